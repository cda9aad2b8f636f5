"""Ctrl-C at any line of the engine: the call that it hits leaves nothing behind, and nobody else loses anything.

The trace function counts the lines of nanovllm/engine that a `generate` executes and raises KeyboardInterrupt at
one of them. CI takes a sample of the lines; NANOVLLM_ALL_INTERRUPTS=1 takes every one.
"""

import os

import pytest

from nanovllm import LLM, SamplingParams
from tests.helpers import Interrupter, save_random_model, small_config

SAMPLE = 40
PROMPTS = [[1, 2, 3], [4] * 20, [5, 6]]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
OTHER = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random_model(path, small_config("llama", num_hidden_layers=1))
    return path


@pytest.mark.parametrize("overlap", [False, True])
def test_interrupt_at_any_line(folder, overlap):
    with LLM(folder, device="cpu", overlap=overlap, num_kvcache_blocks=6, max_num_seqs=3) as llm:

        def generate():
            return [out["token_ids"] for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]

        expected = generate()
        expected_other = llm.generate([7, 8], OTHER, use_tqdm=False)[0]["token_ids"]
        counter = Interrupter(-1)
        assert counter.run(generate) == expected
        every = os.environ.get("NANOVLLM_ALL_INTERRUPTS") == "1"
        for at in range(1, counter.count, 1 if every else counter.count // SAMPLE):
            other = llm.add_request([7, 8], OTHER)
            with pytest.raises(KeyboardInterrupt):
                Interrupter(at).run(generate)
            assert set(llm._requests) <= {other}, f"line {at}"
            sequences = [request.sequences[0] for request in llm._requests.values()]
            llm.scheduler.block_manager.check_integrity(sequences)
            assert generate() == expected, f"line {at}"
            done = []
            while not llm.is_finished():
                done += llm.step()[0]
            assert done == [(other, expected_other)], f"line {at}"
            assert len(llm.scheduler._free_rows) == 3
        llm.scheduler.block_manager.check_integrity([])
