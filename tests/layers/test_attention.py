"""The torch backend against attention written out in float64."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanovllm.engine.step import Step, StepInput
from nanovllm.layers.attention import QUERY_TILE, TorchAttention


def naive(q, k, v, scale, window=None, softcap=None):
    """Queries are the last of the keys' positions; float64, one head at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q, dtype=torch.float64)
    offset = len(k) - len(q)
    for head in range(q.shape[1]):
        for i in range(len(q)):
            seen = slice(max(offset + i + 1 - (window or len(k)), 0), offset + i + 1)
            scores = k[seen, head // group].double() @ q[i, head].double() * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            out[i, head] = scores.softmax(0) @ v[seen, head // group].double()
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 80), (7, 1, 96)])
@pytest.mark.parametrize("block_size", [16, 48])
def test_mixed_step_against_float64(heads, kv_heads, head_dim, block_size):
    generator = torch.Generator().manual_seed(heads)
    lengths = np.array([1, 1, 5, 1, 40, 33, 1], np.int32)
    starts = np.array([0, 30, 0, 400, 17, 0, 47], np.int32)
    rows = np.array([3, 0, 6, 2, 5, 1, 4], np.int32)
    contexts = starts + lengths
    num_blocks = int(sum(-(-contexts // block_size))) + 3
    order = torch.randperm(num_blocks, generator=generator)
    tables = torch.full((8, 40), 10**6, dtype=torch.int32)  # a stale column must not be followed
    k_cache, v_cache = torch.full((2, num_blocks, block_size, kv_heads, head_dim), 1e3).unbind(0)
    texts, used = [], 0
    for row, context in zip(rows, contexts, strict=True):
        blocks = order[used : used + -(-context // block_size)]
        used += len(blocks)
        tables[row, : len(blocks)] = blocks.int()
        k, v = torch.randn(2, context, kv_heads, head_dim, generator=generator).unbind(0)
        for cache, values in ((k_cache, k), (v_cache, v)):
            flat = cache[blocks].flatten(0, 1)
            flat[:context] = values
            cache[blocks] = flat.view(len(blocks), *cache.shape[1:])
        texts.append((k, v))
    q = torch.randn(int(lengths.sum()), heads, head_dim, generator=generator)
    inputs = StepInput(rows, starts, lengths, np.zeros(len(q), np.int32), np.ones(7, np.int32), None, None)
    windows = (None, 1, 16, 17, 20, 48)
    backend = TorchAttention(windows)
    kv_cache = torch.empty(1, 2, 1, block_size, 1, 1)
    step = Step(None, None, None, None, None, tables, 40, kv_cache)
    plan = backend.plan(inputs, None, None, step)
    assert len(plan[None].decodes) > 1
    assert len(plan[None].prompts) == 3
    parts = q.split(lengths.tolist())
    for window, softcap in itertools.product(windows, (None, 1.5)):
        out = backend.attend(q, k_cache, v_cache, replace(step, plan=plan), 0.3, window, softcap=softcap)
        expected = [naive(part, *kv, 0.3, window, softcap) for part, kv in zip(parts, texts, strict=True)]
        torch.testing.assert_close(out.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_blocks_before_the_window_are_not_gathered():
    one = np.ones(1, np.int32)
    tables = torch.arange(40, dtype=torch.int32)[None]
    step = Step(None, None, None, None, None, tables, 40, torch.empty(1, 2, 1, 16, 1, 1))
    decode = StepInput(one * 0, one * 400, one, np.zeros(1, np.int32), one, None, None)
    assert TorchAttention([32]).plan(decode, None, None, step)[32].decodes[0].blocks.tolist() == [23, 24, 25]
    prompt = StepInput(one * 0, one * 400, one * 20, np.zeros(20, np.int32), one, None, None)
    assert TorchAttention([32]).plan(prompt, None, None, step)[32].prompts[0].blocks.tolist() == [23, 24, 25, 26]


@pytest.mark.parametrize("window", [None, 30, QUERY_TILE, QUERY_TILE + 40])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_prompt_longer_than_a_query_tile(window, softcap):
    generator = torch.Generator().manual_seed(0)
    n, cached = QUERY_TILE + 30, 21
    k, v = torch.randn(2, n + cached, 1, 16, generator=generator).unbind(0)
    q = torch.randn(n, 2, 16, generator=generator)
    blocks = -(-(n + cached) // 16)
    caches = [torch.zeros(blocks, 16, 1, 16) for _ in range(2)]
    for cache, values in zip(caches, (k, v), strict=True):
        cache.view(-1, 1, 16)[: n + cached] = values
    tables = torch.arange(blocks, dtype=torch.int32)[None]
    one = np.ones(1, np.int32)
    inputs = StepInput(one * 0, one * cached, one * n, np.zeros(n, np.int32), one, None, None)
    backend = TorchAttention([window])
    step = Step(None, None, None, None, None, tables, n, torch.empty(1, 2, 1, 16, 1, 1))
    step = replace(step, plan=backend.plan(inputs, None, None, step))
    out = backend.attend(q, *caches, step, 0.25, window, softcap=softcap)
    torch.testing.assert_close(out.double(), naive(q, k, v, 0.25, window, softcap), rtol=1e-5, atol=1e-5)
