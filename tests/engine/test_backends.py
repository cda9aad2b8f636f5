"""The same tokens from every backend, with and without graphs, chunks, prefix cache and overlap.

On a GPU natively; on a CPU the Triton kernels run in Triton's interpreter, on a smaller case.
"""

import gc
import importlib.util
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import choices, shared_prefix
from nanovllm.engine.shared_prefix import SharedPrefixFinder
from nanovllm.layers import triton_attention
from tests.helpers import DEVICE, VOCAB, random_prompt, reference_greedy, save_random_model, small_config

NUM_TOKENS = 64
COMBINATIONS = [  # every pair of values occurs
    # backend, chunk, eager, prefix caching, overlap
    ("triton", 16, False, True, True),
    ("triton", 64, False, False, True),
    ("triton", None, False, True, False),
    ("triton", None, True, False, True),
    ("triton", 16, True, False, False),
    ("triton", 64, True, True, False),
    ("triton", None, False, True, True),
    ("torch", 16, False, False, True),
    ("torch", 64, True, True, True),
    ("torch", None, False, True, False),
]
VARIED = [  # plain and not, side by side: filters, penalties, both, and logits that are edited before
    SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, **options)
    for options in (
        {},
        {"top_p": 0.7},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"top_k": 20, "top_p": 0.9, "presence_penalty": 0.5},
        {"top_k": 9, "min_p": 0.05, "repetition_penalty": 1.2, "logit_bias": {5: 2.0}, "min_tokens": 3},
    )
]


def mixed_prompts():
    shared = random_prompt(300, 7)
    return [random_prompt(n, n) for n in (1, 15, 16, 17, 255, 256, 257)] + [shared, shared[:260], [*shared[:256], 5]]


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2"])
def model(request, tmp_path_factory):
    """(folder, prompts, expected greedy tokens of transformers on the CPU in float32)."""
    changes = {
        "qwen3": {"head_dim": 64},
        "llama": {"num_attention_heads": 6, "hidden_size": 96 * 6, "head_dim": 96},
        "qwen2": {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 7 * 80},
    }[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference = save_random_model(folder, small_config(request.param, **changes))
    prompts = mixed_prompts()
    return folder, prompts, [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]


def generate(llm, prompts, **params):
    defaults = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    outs = llm.generate(prompts, SamplingParams(**{**defaults, **params}), use_tqdm=False)
    return [out["token_ids"] for out in outs]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "chunk", "eager", "caching", "overlap"), COMBINATIONS)
def test_gpu_gives_the_tokens_of_the_cpu(model, backend, chunk, eager, caching, overlap):
    folder, prompts, expected = model
    with LLM(
        folder,
        dtype="float32",
        attention_backend=backend,
        enforce_eager=eager,
        enable_prefix_caching=caching,
        overlap=overlap,
        max_num_batched_tokens=chunk,
        max_num_seqs=16,
        num_kvcache_blocks=60,
    ) as llm:
        assert (llm.model_runner.graphs is not None) == (not eager and backend == "triton")
        assert generate(llm, prompts) == expected
        assert generate(llm, prompts) == expected


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs the flash-attn package")
@pytest.mark.parametrize("eager", [False, True])
def test_flash_attn_agrees_with_triton_in_half_precision(tmp_path, eager):
    """Not token by token, since half precision has ties: first tokens of many prompts agree nearly always."""
    save_random_model(tmp_path, small_config("qwen3", head_dim=128))
    prompts = [random_prompt(n, n) for n in range(1, 400, 7)]
    first = {}
    for backend in ("flash_attn", "triton"):
        with LLM(
            tmp_path,
            dtype="float16",
            attention_backend=backend,
            enforce_eager=eager,
            max_num_seqs=64,
            num_kvcache_blocks=140,
        ) as llm:
            first[backend] = [tokens[:4] for tokens in generate(llm, prompts, max_tokens=4)]
    same = np.mean([a == b for a, b in zip(first["flash_attn"], first["triton"], strict=True)])
    assert same > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 3, 5, 16, 17, 33])
def test_batches_that_fit_no_graph_exactly_are_padded(model, num_seqs):
    folder, prompts, expected = model
    with LLM(folder, dtype="float32", max_num_seqs=33, num_kvcache_blocks=80) as llm:
        several = [prompts[i % len(prompts)] for i in range(num_seqs)]
        assert generate(llm, several) == [expected[i % len(prompts)] for i in range(num_seqs)]


@pytest.mark.gpu
def test_preemption_under_graphs_and_overlap(model):
    folder, prompts, expected = model
    with LLM(folder, dtype="float32", max_num_seqs=16, kvcache_block_size=16, num_kvcache_blocks=40) as llm:
        assert generate(llm, prompts) == expected


@pytest.mark.gpu
def test_seeded_samples_do_not_depend_on_graphs_overlap_or_batch(model):
    folder, prompts, _ = model
    runs = []
    for options in (
        {},
        {"enforce_eager": True},
        {"overlap": False},
        {"max_num_seqs": 3},
        {"attention_backend": "torch"},
    ):
        with LLM(folder, dtype="float32", num_kvcache_blocks=80, **{"max_num_seqs": 16, **options}) as llm:
            runs.append([out["token_ids"] for out in llm.generate(prompts, VARIED * 2, use_tqdm=False)])
    assert all(run == runs[0] for run in runs[1:])


def count_shared_passes(monkeypatch):
    """Let the smallest prefix do; the returned list grows with each launch (or capture) of the pass over prefixes."""
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 0)
    monkeypatch.setattr(choices, "SharedPrefixFinder", partial(SharedPrefixFinder, min_run_saving=1))
    launches, launch = [], triton_attention.shared_parts
    monkeypatch.setattr(triton_attention, "shared_parts", lambda *args: launches.append(len(args[0])) or launch(*args))
    return launches


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"overlap": False}, {"max_num_batched_tokens": 300}])
def test_shared_prefixes_are_read_once_and_nothing_changes(model, options, monkeypatch):
    """Two groups and loners; sequences of a group end at different times."""
    folder, *_ = model
    launches = count_shared_passes(monkeypatch)
    a, b = random_prompt(1000, 1), random_prompt(600, 2)
    prompts = [[*a, i] for i in range(20)] + [[*b, i, 7] for i in range(5)] + [random_prompt(70, 3), a[:900]]
    params = [SamplingParams(temperature=0, max_tokens=8 + 3 * i % 40, ignore_eos=True) for i in range(len(prompts))]
    runs = []
    for share in (True, False):
        launches.clear()
        with LLM(
            folder,
            dtype="float32",
            shared_prefix_attention=share,
            max_num_seqs=32,
            num_kvcache_blocks=120,
            kvcache_block_size=64,
            **options,
        ) as llm:
            runs.append([out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)])
            finder = llm._step_builder._shared_prefixes
        assert (len(launches) > 0) == share == (finder is not None)
        assert finder is None or finder.num_found > 0
    assert runs[0] == runs[1]


@pytest.mark.gpu
def test_memory_that_is_missing_is_named(model):
    folder, *_ = model
    with pytest.raises(
        ValueError, match=r"GiB of GPU memory are missing for a pool of \d+ KV blocks.*Raise gpu_memory"
    ):
        LLM(folder, num_kvcache_blocks=10**8)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization 0\.0001 allows"):
        LLM(folder, gpu_memory_utilization=0.0001)


@pytest.mark.gpu
def test_pool_takes_the_share_of_free_memory_and_close_gives_it_back(model):
    folder, prompts, expected = model
    with LLM(
        folder, dtype="float32", num_kvcache_blocks=40
    ) as llm:  # libraries take memory at their first use and keep it
        assert generate(llm, prompts[:2]) == expected[:2]
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        llm = LLM(folder, dtype="float32", gpu_memory_utilization=0.3)
        used = before - torch.cuda.mem_get_info()[0]
        assert 0.25 * before < used <= 0.31 * before
        assert generate(llm, prompts[:2]) == expected[:2]
        llm.close()
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 2**25


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernels natively")
def test_triton_backend_in_the_interpreter(tmp_path):
    """The engine on the kernels, end to end, without a GPU: mixed steps, a prefix hit, a chunked prompt."""
    reference = save_random_model(tmp_path, small_config("qwen3", num_hidden_layers=1))
    prompts = [[5], random_prompt(40, 1), [*random_prompt(40, 1)[:32], 9]]
    params = [replace(some, max_tokens=6) for some in VARIED]
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "kvcache_block_size": 16, "num_kvcache_blocks": 20}
    with LLM(tmp_path, device="cpu", attention_backend="triton", **options) as llm:
        assert llm.model_runner.attention.name == "triton"
        assert generate(llm, prompts, max_tokens=6) == [reference_greedy(reference, prompt, 6) for prompt in prompts]
        sampled = generate(llm, prompts, temperature=1.0, max_tokens=6)
        varied = [out["token_ids"] for out in llm.generate(prompts[:1] * 5, params, use_tqdm=False)]
    with LLM(tmp_path, device="cpu", attention_backend="torch", **options) as llm:
        generate(llm, prompts, max_tokens=6)  # the same sequence numbers, which the seeds depend on
        assert generate(llm, prompts, temperature=1.0, max_tokens=6) == sampled
        assert [out["token_ids"] for out in llm.generate(prompts[:1] * 5, params, use_tqdm=False)] == varied
    assert all(0 <= token < VOCAB for tokens in sampled for token in tokens)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernels natively")
def test_shared_prefixes_in_the_interpreter(tmp_path, monkeypatch):
    reference = save_random_model(tmp_path, small_config("qwen3", num_hidden_layers=1))
    launches = count_shared_passes(monkeypatch)
    prefix = random_prompt(144, 1)
    prompts = [[*prefix, i] for i in range(4)] + [random_prompt(20, 2)]
    with LLM(
        tmp_path,
        device="cpu",
        attention_backend="triton",
        max_num_seqs=6,
        max_num_batched_tokens=192,
        kvcache_block_size=16,
        num_kvcache_blocks=60,
    ) as llm:
        outs = generate(llm, prompts, max_tokens=4)
    assert outs == [reference_greedy(reference, prompt, 4) for prompt in prompts]
    assert max(launches) >= 4


def test_shared_prefix_attention_where_there_is_none_is_refused(tmp_path):
    small_config("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="shared_prefix_attention needs attention_backend 'triton', not 'torch'"):
        LLM(tmp_path, device="cpu", load_format="dummy", shared_prefix_attention=True)
    if DEVICE == "cpu":  # the kernels run in the interpreter
        small_config("mistral", sliding_window=16).save_pretrained(tmp_path)
        options = {"device": "cpu", "attention_backend": "triton", "load_format": "dummy"}
        with pytest.raises(ValueError, match="shared_prefix_attention needs layers without a window"):
            LLM(tmp_path, **options, shared_prefix_attention=True)
        LLM(tmp_path, **options).close()


def test_backends_that_cannot_be_are_refused(tmp_path, monkeypatch):
    small_config("qwen3").save_pretrained(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("triton", "flash_attn"):
        with pytest.raises(ValueError, match=f"attention_backend '{name}' needs a GPU; on a CPU use 'torch'"):
            LLM(tmp_path, device="cpu", load_format="dummy", attention_backend=name)
