"""Log-probabilities of prompts against transformers' log-softmax: in chunks, under pressure, beside others, cached."""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import prompt_scores
from tests.helpers import random_prompt, reference_greedy, save_random_model, small_config

PROMPTS = [random_prompt(n, n) for n in (1, 2, 17, 40)] + [random_prompt(40, 40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, save_random_model(folder, small_config("qwen3"))


def expected(reference, prompt):
    """[len(prompt), vocab_size], row i of what comes after token i."""
    with torch.inference_mode():
        return reference(torch.tensor([prompt])).logits[0].log_softmax(-1)


def check(entries, prompt, table, count):
    assert entries[0] is None
    assert len(entries) == len(prompt)
    for i, entry in enumerate(entries[1:]):
        best = table[i].topk(count)
        ids = [prompt[i + 1], *best.indices.tolist()]
        assert list(entry) == list(dict.fromkeys(ids)), "the token itself comes first, then the most likely ones"
        for token, value in entry.items():
            assert value["logprob"] == pytest.approx(float(table[i, token]), abs=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_prompt_logprobs_equal_transformers(model, chunk, overlap, monkeypatch):
    """Beside requests that do not ask; twice, since the prefix cache is full the second time."""
    monkeypatch.setattr(prompt_scores, "CHUNK_ELEMENTS", 5 * 199)  # five rows of logits at once
    folder, reference = model
    tables = [expected(reference, prompt) for prompt in PROMPTS]
    params = [
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=k) for k in (0, 3, None, 2, 1)
    ]
    with LLM(folder, device="cpu", overlap=overlap, max_num_batched_tokens=chunk, max_num_seqs=4) as llm:
        for _ in range(2):
            outs = llm.generate(PROMPTS, params, use_tqdm=False)
            for out, prompt, table, param in zip(outs, PROMPTS, tables, params, strict=True):
                assert out["token_ids"] == reference_greedy(reference, prompt, 5)
                assert ("prompt_logprobs" in out) == (param.prompt_logprobs is not None)
                if param.prompt_logprobs is not None:
                    assert out["num_cached_tokens"] == 0
                    check(out["prompt_logprobs"], prompt, table, param.prompt_logprobs)


def test_under_pressure_and_for_several_completions(model):
    """Preempted sequences keep what they have; completions of one prompt share it."""
    folder, reference = model
    prompts = [random_prompt(30 + i, i) for i in range(6)]
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, prompt_logprobs=2, n=2)
    with LLM(folder, device="cpu", num_kvcache_blocks=9, max_num_seqs=6, max_num_batched_tokens=16) as llm:
        outs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats()["preemptions"] > 0
    for out, prompt in zip(outs, prompts, strict=True):
        assert len(out["completions"]) == 2
        check(out["prompt_logprobs"], prompt, expected(reference, prompt), 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_in_the_middle_of_the_prompt(model, overlap):
    """The prompt is computed anew from its beginning; what was scored before is not there twice."""
    folder, reference = model
    prompts = [[5, 6, 7], random_prompt(60, 3)]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1),
    ]
    options = {"num_kvcache_blocks": 5, "max_num_seqs": 2, "max_num_batched_tokens": 4, "overlap": overlap}
    with LLM(folder, device="cpu", kvcache_block_size=16, **options) as llm:
        for prompt, param in zip(prompts, params, strict=True):
            seq_id = llm.add_request(prompt, param)
        (seq,) = llm._requests[seq_id].sequences
        while not seq.num_preemptions:
            llm.step()
        assert 1 < len(seq.prompt_logprobs) < len(prompts[1])
        outs = {}
        while not llm.is_finished():
            outs.update(llm.step_outputs())
    check(outs[seq_id]["prompt_logprobs"], prompts[1], expected(reference, prompts[1]), 1)


def test_score_is_the_sum_of_the_tokens_log_probabilities(model):
    folder, reference = model
    with LLM(folder, device="cpu") as llm:
        scores = llm.score(PROMPTS, use_tqdm=False)
    for score, prompt in zip(scores, PROMPTS, strict=True):
        table = expected(reference, prompt)
        values = [float(table[i, token]) for i, token in enumerate(prompt[1:])]
        assert score["token_ids"] == prompt
        assert score["logprobs"][0] is None
        assert score["logprobs"][1:] == pytest.approx(values, abs=1e-4)
        assert score["total"] == pytest.approx(sum(values), abs=1e-3)


def test_bad_counts_are_refused():
    with pytest.raises(ValueError, match="prompt_logprobs must be at most 20, got 21"):
        SamplingParams(prompt_logprobs=21)
    with pytest.raises(TypeError, match="prompt_logprobs must be an integer"):
        SamplingParams(prompt_logprobs=True)
