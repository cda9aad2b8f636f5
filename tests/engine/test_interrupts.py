"""Ctrl-C at any line of the library: the call that it hits leaves nothing behind, and nobody else loses anything.

A trace function counts the lines of nanovllm/ that a call executes and raises KeyboardInterrupt at one of them. CI
takes a few of the lines; NANOVLLM_INTERRUPTS=1000 takes so many of each call, or all where there are fewer.
"""

import gc
import os
import random

import pytest

from nanovllm import LLM, SamplingParams
from tests.helpers import Interrupter, save_random_model, save_tokenizer, small_config

SAMPLE = int(os.environ.get("NANOVLLM_INTERRUPTS", "25"))
PROMPTS = [[1, 2, 3], [4] * 20, [5, 6]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop="no such text", logprobs=1),
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, frequency_penalty=0.3, n=2, seed=1),
]
OTHER = [([7, 8], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)) for n in (3, 9)]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def llm(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    save_random_model(path, small_config("llama", vocab_size=258, num_hidden_layers=1))
    with LLM(path, device="cpu", overlap=request.param, num_kvcache_blocks=6, max_num_seqs=3) as engine:
        yield engine


def answers(outs):
    return [[(c["token_ids"], c["text"]) for c in out.get("completions", [out])] for out in outs]


def generate(llm):
    return answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def stream(llm):
    got = {}
    for new in llm.stream(PROMPTS, PARAMS):
        ids, text = got.get((new.index, new.completion), ([], ""))
        got[new.index, new.completion] = (ids + new.token_ids, text + new.text)
    return [[got[0, 0]], [got[1, 0]], [got[2, 0], got[2, 1]]]


def drain(llm):
    done = []
    while not llm.is_finished():
        done += llm.step()[0]
    return done


def check_idle(llm):
    assert llm.is_finished()
    assert not llm._requests
    assert gc.isenabled()
    assert not gc.get_freeze_count()
    llm.scheduler.block_manager.check_integrity([])
    assert sorted(llm.scheduler._free_rows) == [0, 1, 2]


def lines_of(call):
    """Numbers of the lines to interrupt, of all that `call` executes."""
    counter = Interrupter(-1)
    counter.run(call)
    return range(1, counter.count, max(1, counter.count // SAMPLE))


@pytest.mark.parametrize("call", [generate, stream])
def test_interrupt_at_any_line(llm, call):
    expected = call(llm)
    assert expected == generate(llm)
    expected_others = [llm.generate(*other, use_tqdm=False)[0]["token_ids"] for other in OTHER]
    for at in lines_of(lambda: call(llm)):
        others = [llm.add_request(*other) for other in OTHER]
        interrupter = Interrupter(at)
        with pytest.raises(KeyboardInterrupt):
            interrupter.run(lambda: call(llm))
        llm.stats()  # any use mends what broke off
        assert {r.request_id for r in llm._requests.values()} <= set(others), interrupter.where
        sequences = [seq for request in set(llm._requests.values()) for seq in request.sequences]
        llm.scheduler.block_manager.check_integrity(sequences)
        assert generate(llm) == expected, interrupter.where
        assert sorted(drain(llm)) == list(zip(others, expected_others, strict=True)), interrupter.where
        check_idle(llm)


def test_second_interrupt_while_the_first_is_handled(llm):
    """Whatever is left of the call runs out unseen at worst; later calls get their own answers."""
    expected = generate(llm)
    expected_other = llm.generate(*OTHER[1], use_tqdm=False)[0]["token_ids"]
    rng = random.Random(0)
    for at in lines_of(lambda: generate(llm)):
        other = llm.add_request(*OTHER[1])
        interrupter = Interrupter(at, again_after=rng.randint(1, 120))
        with pytest.raises(KeyboardInterrupt):
            interrupter.run(lambda: generate(llm))
        assert generate(llm) == expected, interrupter.where
        assert drain(llm) == [(other, expected_other)], interrupter.where
        check_idle(llm)


def test_interrupt_at_any_line_of_add_request(llm):
    """Either it raises and there is no request, or it returns and there is one."""
    for at in lines_of(lambda: llm.add_request([1, 2], PARAMS[2])):
        drain(llm)
        with pytest.raises(KeyboardInterrupt):
            Interrupter(at).run(lambda: llm.add_request([1, 2], PARAMS[2]))
        assert llm.is_finished()
        check_idle(llm)
    drain(llm)


def test_interrupt_at_any_line_of_step(llm):
    """What a step finished is reported by it or by a later one."""
    expected = [llm.generate(*other, use_tqdm=False)[0]["token_ids"] for other in OTHER]

    def run(done):
        while not llm.is_finished():
            done += llm.step()[0]

    def add():
        return [llm.add_request(*other) for other in OTHER]

    keys = add()
    for at in lines_of(lambda: run([])):
        keys, done = add(), []
        interrupter = Interrupter(at)
        with pytest.raises(KeyboardInterrupt):
            interrupter.run(lambda: run(done))  # noqa: B023
        run(done)
        assert sorted(done) == list(zip(keys, expected, strict=True)), interrupter.where
        check_idle(llm)
