"""What the flash_attn backend asks of the package, answered by plain torch with the package's documented meaning."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm.engine.step import Step, StepInput
from nanovllm.kernels.decode_attention import paged_decode_reference
from nanovllm.kernels.prefill_attention import paged_prefill_reference
from nanovllm.layers.flash_attention import FlashAttention


def window_of(window_size):
    before, after = window_size
    assert after == (-1 if before < 0 else 0)
    return None if before < 0 else before + 1


def with_kvcache(q, k, v, cache_seqlens, block_table, softmax_scale, causal, window_size=(-1, -1), softcap=0.0):
    assert causal
    rows = torch.arange(len(q))
    return paged_decode_reference(
        q.squeeze(1),
        k,
        v,
        block_table,
        rows,
        cache_seqlens,
        softmax_scale,
        window_of(window_size),
        softcap=softcap or None,
    ).unsqueeze(1)


def varlen(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k,
    softmax_scale,
    causal,
    block_table,
    window_size=(-1, -1),
    softcap=0.0,
):
    assert causal
    lens = cu_seqlens_k.diff()
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(lens.max()))
    rows = torch.arange(len(lens))
    options = {"window": window_of(window_size), "softcap": softcap or None}
    return paged_prefill_reference(q, k, v, block_table, rows, cu_seqlens_q, lens, softmax_scale, **options)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (40, None), (None, 0.5), (40, 0.5)])
def test_a_mixed_step(window, softcap, monkeypatch):
    package = SimpleNamespace(flash_attn_with_kvcache=with_kvcache, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = torch.randn(2, 6, 256, 1, 64, generator=generator, dtype=torch.float16)
    tables = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
    starts, lengths = np.array([99, 300, 50], np.int32), np.array([1, 1, 30], np.int32)
    rows = np.array([2, 0, 1], np.int32)
    q = torch.randn(32, 2, 64, generator=generator, dtype=torch.float16)
    inputs = StepInput(rows, starts, lengths, np.zeros(32, np.int32), np.ones(3, np.int32), None, None)
    device_rows, context_lens = torch.from_numpy(rows), torch.from_numpy(starts + lengths)
    cu = torch.tensor([0, 1, 2, 32], dtype=torch.int32)
    step = Step(None, None, device_rows, cu, context_lens, tables, 30, k_cache)
    backend = FlashAttention(torch.float16, 64)
    step = replace(step, plan=backend.plan(inputs, device_rows, context_lens, step))
    out = backend.attend(q, k_cache, v_cache, step, 0.2, window, softcap=softcap)
    where = (tables, device_rows, cu, context_lens)
    expected = paged_prefill_reference(q, k_cache, v_cache, *where, 0.2, window=window, softcap=softcap)
    torch.testing.assert_close(out, expected)
