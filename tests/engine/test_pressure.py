"""Pools that are far too small, and what a prefix cache may never do: on a whole engine, against transformers."""

import random

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import block_manager
from tests.helpers import reference_greedy, save_random_model, small_config

NUM_REQUESTS = 200
TINY_POOL = {"num_kvcache_blocks": 5, "max_num_seqs": 4, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random_model(path, small_config("llama", num_hidden_layers=1, max_position_embeddings=80), seed=1)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def requests():
    """Prompts of 1 to 50 tokens, two thirds of which share a beginning, and lengths of 1 to 16."""
    rng = random.Random(0)
    shared = [rng.randrange(199) for _ in range(32)]
    prompts = [
        shared[: rng.choice([0, 16, 32])] + [rng.randrange(199) for _ in range(rng.randint(1, 18))]
        for _ in range(NUM_REQUESTS)
    ]
    return prompts, [greedy(rng.randint(1, 16)) for _ in range(NUM_REQUESTS)]


def check_idle(llm):
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)
    llm.scheduler.block_manager.check_integrity([])


@pytest.fixture(scope="module")
def expected(folder):
    """What an engine with room for all of them answers."""
    with LLM(folder, device="cpu", num_kvcache_blocks=NUM_REQUESTS * 5, max_num_seqs=NUM_REQUESTS) as llm:
        outs = llm.generate(*requests(), use_tqdm=False)
        assert llm.stats()["preemptions"] == 0
    return [out["token_ids"] for out in outs]


@pytest.mark.parametrize("options", [{"overlap": True}, {"enable_prefix_caching": False}])
def test_hundreds_of_requests_in_a_few_blocks_answer_as_without_pressure(folder, reference, expected, options):
    prompts, params = requests()
    with LLM(folder, device="cpu", **TINY_POOL, **options) as llm:
        outs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
        check_idle(llm)
    assert [out["token_ids"] for out in outs] == expected
    assert {out["finish_reason"] for out in outs} == {"length"}
    for prompt, token_ids in zip(prompts[:5], expected[:5], strict=True):
        assert token_ids == reference_greedy(reference, prompt, len(token_ids))
    assert stats["preemptions"] > 5
    assert stats["generated_tokens"] == sum(map(len, expected))
    cached = options.get("enable_prefix_caching", True)
    assert (stats["prefix_hit_tokens"] > 500) == cached


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_others", [0, 3])
def test_request_that_outgrows_the_pool_ends_with_length_at_the_exact_token(folder, reference, num_others, overlap):
    """Three blocks hold the KV of 48 tokens; the 49th is drawn from them and needs none."""
    others = [[9, i] for i in range(num_others)]
    with LLM(folder, device="cpu", overlap=overlap, num_kvcache_blocks=3) as llm:
        outs = llm.generate([[1, 2, 3], *others], [greedy(1000)] + [greedy(20)] * num_others, use_tqdm=False)
        check_idle(llm)
    assert [out["finish_reason"] for out in outs] == ["length"] * (1 + num_others)
    assert outs[0]["token_ids"] == reference_greedy(reference, [1, 2, 3], 49 - 3)
    for out, prompt in zip(outs[1:], others, strict=True):
        assert out["token_ids"] == reference_greedy(reference, prompt, 20)


@pytest.mark.parametrize("bits", [0, 1])
def test_forced_hash_collisions_never_mix_texts(folder, expected, monkeypatch, bits):
    """All blocks under one key, or under two: hits become rare, answers stay."""
    real = block_manager.chain_key
    monkeypatch.setattr(block_manager, "chain_key", lambda parent, tokens: bytes([real(parent, tokens)[0] & bits]))
    prompts, params = (listed[:60] for listed in requests())
    with LLM(folder, device="cpu", num_kvcache_blocks=40, max_num_seqs=8) as llm:
        for _ in range(2):
            outs = llm.generate(prompts, params, use_tqdm=False)
            assert [out["token_ids"] for out in outs] == expected[:60]
        assert llm.stats()["prefix_hit_tokens"] > 0
        check_idle(llm)


def test_fully_cached_prompts_answer_as_they_did_at_first(folder, reference):
    prompts = [list(range(n)) for n in (16, 32, 33, 48)]
    with LLM(folder, device="cpu") as llm:
        first = llm.generate(prompts, greedy(10), use_tqdm=False)
        again = llm.generate(prompts, greedy(10), use_tqdm=False)
        llm.reset_prefix_cache()
        reset = llm.generate(prompts[:1], greedy(10), use_tqdm=False)
    for outs in (first, again):
        assert [out["token_ids"] for out in outs] == [reference_greedy(reference, prompt, 10) for prompt in prompts]
    assert [out["num_cached_tokens"] for out in again] == [0, 16, 32, 32]  # one token at least is computed
    assert reset[0]["token_ids"] == first[0]["token_ids"]


def test_equal_prompts_in_one_call_are_computed_once(folder):
    prompt = list(range(50))
    with LLM(folder, device="cpu", max_num_seqs=8) as llm:
        outs = llm.generate([prompt] * 6, greedy(4), use_tqdm=False)
        assert [out["num_cached_tokens"] for out in outs] == [0] + [48] * 5
        assert llm.stats()["computed_tokens"] == 50 + 5 * 2 + 6 * 3  # once, five ends, three decodes of each
        assert len({tuple(out["token_ids"]) for out in outs}) == 1
