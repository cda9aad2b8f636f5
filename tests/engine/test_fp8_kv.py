"""A KV cache in float8: equal tokens however the work is ordered, and a bounded distance to float32."""

import logging

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.kv_scales import power_of_two_scales
from nanovllm.engine.memory import kv_bytes_per_block
from nanovllm.kernels.reference import FP8
from tests.engine.test_backends import count_shared_passes, mixed_prompts
from tests.helpers import engine_logits, random_prompt, save_random_model, small_config

GPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernels natively")
TRITON = pytest.param("triton", marks=pytest.mark.gpu)
FAMILIES = ["qwen3", "qwen2", "gemma3", "olmo2", "phi3"]


def run(folder, prompts, max_tokens=12, **options):
    defaults = {"kv_cache_dtype": "fp8", "dtype": "float32", "max_num_seqs": 16, "kvcache_block_size": 16}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(folder, **{"num_kvcache_blocks": 200, **defaults, **options}) as llm:
        assert llm.model_runner.kv_cache.dtype == FP8
        outs = [[out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)] for _ in range(2)]
        return outs, llm.stats()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A model with biases on its keys, as some have them: 600 and more, beyond float8's largest value."""
    folder = tmp_path_factory.mktemp("qwen2")
    model = save_random_model(folder, small_config("qwen2", num_attention_heads=6, hidden_size=6 * 64))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[::16] *= 600
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("backend", ["torch", TRITON])
def test_nothing_that_reorders_the_work_changes_a_token(qwen, backend):
    prompts = mixed_prompts()
    (first, again), _ = run(qwen, prompts, attention_backend=backend)
    assert again == first, "prefix hits read what was stored"
    for options in (
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 100, "max_num_seqs": 3},
        {"overlap": backend == "torch"},
        {"enforce_eager": True},
        {"kvcache_block_size": 64},
    ):
        assert run(qwen, prompts, attention_backend=backend, **options)[0] == [first, first], options
    outs, stats = run(qwen, prompts, attention_backend=backend, num_kvcache_blocks=40)
    assert outs == [first, first]
    assert stats["preemptions"] > 0


@GPU_ONLY
def test_triton_gives_the_tokens_of_torch_in_the_interpreter(tmp_path, monkeypatch):
    save_random_model(tmp_path, small_config("qwen3", num_hidden_layers=1))
    prefix = random_prompt(144, 1)
    prompts = [[*prefix, i] for i in range(4)] + [random_prompt(20, 2), [5]]
    options = {"max_num_batched_tokens": 192, "max_num_seqs": 6, "device": "cpu"}
    expected, _ = run(tmp_path, prompts, 4, **options)
    launches = count_shared_passes(monkeypatch)
    assert run(tmp_path, prompts, 4, attention_backend="triton", **options)[0] == expected
    assert launches[-1] >= 4


@pytest.mark.gpu
def test_triton_gives_the_tokens_of_torch(qwen):
    prompts = mixed_prompts()
    assert run(qwen, prompts, 40)[0] == run(qwen, prompts, 40, attention_backend="torch")[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_near_those_of_float32(tmp_path, family):
    save_random_model(tmp_path, small_config(family))
    prompt = random_prompt(70, 3)
    logits = []
    for kv_cache_dtype in ("auto", "fp8"):
        with LLM(tmp_path, dtype="float32", kv_cache_dtype=kv_cache_dtype, num_kvcache_blocks=20) as llm:
            logits.append(engine_logits(llm, prompt))
    difference = ((logits[1] - logits[0]).norm() / logits[0].norm()).item()
    assert 1e-4 < difference < 0.15


def test_scales_make_room_for_large_keys(qwen):
    """Scale 1 would cut them off."""
    with LLM(qwen, dtype="float32", kv_cache_dtype="fp8", num_kvcache_blocks=20) as llm:
        scales = llm.model_runner.kv_scales
        engine_logits(llm, random_prompt(70, 3))
        stored = llm.model_runner.kv_cache.float().abs().amax(dim=(2, 3, 5))  # [layers, 2, heads]
    assert scales.shape == (2, 2, 2)
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)
    assert scales[:, 0].min() >= 2
    assert (stored * scales)[:, 0].min() > 448
    assert stored.max() < 448
    assert stored.min() > 448 / 16


def test_scales_of_anything():
    largest = torch.tensor([0.0, 448.0, 224.0, 225.0, 1.0, float("inf"), float("nan"), 1e30])
    scales = power_of_two_scales(largest)
    assert scales[:7].tolist() == [1, 2, 1, 2, 2**-7, 1, 1]
    assert (largest[1:5] * 2 / scales[1:5]).max() <= 448


def test_half_the_memory(tiny):
    sizes = []
    for kv_cache_dtype in ("auto", "fp8"):
        with LLM(tiny, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, num_kvcache_blocks=20) as llm:
            runner = llm.model_runner
            num_bytes = runner.kv_cache.numel() * runner.kv_cache.element_size()
            one = kv_bytes_per_block(runner.model.spec, runner.kv_cache.dtype, runner.block_size)
            assert num_bytes == 21 * one  # one is for padding
            sizes.append(one)
    assert sizes[0] == 2 * sizes[1]


def test_what_is_active_is_logged_and_what_cannot_be_is_refused(tiny, caplog):
    with caplog.at_level(logging.INFO, "nanovllm"), LLM(tiny, kv_cache_dtype="fp8", num_kvcache_blocks=20):
        pass
    assert "tokens in float8_e4m3fn (largest scale of keys " in caplog.text
    with pytest.raises(ValueError, match="'fp8' needs attention_backend 'triton' or 'torch', not 'flash_attn'"):
        LLM(tiny, kv_cache_dtype="fp8", attention_backend="flash_attn")
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, fp8, got 'int8'"):
        LLM(tiny, kv_cache_dtype="int8")


def test_scales_do_not_depend_on_the_size_of_steps(qwen):
    """Few tokens show less of what keys and values are like: all are looked at, in chunks."""
    scales = []
    for tokens in (1, 16, 1024):
        options = {"kv_cache_dtype": "fp8", "num_kvcache_blocks": 20, "max_num_seqs": 1}
        with LLM(qwen, dtype="float32", max_num_batched_tokens=tokens, **options) as llm:
            scales.append(llm.model_runner.kv_scales.tolist())
    assert scales[0] == scales[1] == scales[2]
