"""Prefill attention against its plain-torch reference, on fresh random inputs with poison in everything unused."""

import pytest
import torch

from nanovllm.kernels.prefill_attention import paged_prefill, paged_prefill_reference
from tests.cases import in_pairs
from tests.kernels.test_decode_attention import to_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter's dot takes its bits for integers
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative error in the 2-norm


def make_cache(context_lens, block_size, num_kv_heads, head_dim, dtype):
    """A paged cache whose blocks are scattered; NaN in every slot, garbage in every table column, that holds nothing.

    Returns (k_cache, v_cache, block_tables, rows)."""
    need = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(need) + 3
    shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
    cache = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    rows = torch.randperm(len(context_lens) + 2)[: len(context_lens)]
    tables = torch.randint(-(2**31), 2**31 - 1, (len(context_lens) + 2, max(need) + 2), dtype=torch.int64)
    free = torch.randperm(num_blocks)
    for row, blocks, n in zip(rows.tolist(), need, context_lens, strict=True):
        tables[row, :blocks], free = free[:blocks], free[blocks:]
        slots = torch.arange(n)
        where = tables[row, slots // block_size].to(DEVICE), (slots % block_size).to(DEVICE)
        for c in cache:
            c[where] = torch.randn((n, num_kv_heads, head_dim), device=DEVICE).to(dtype)
    return cache[0], cache[1], tables.to(DEVICE, torch.int32), rows.to(DEVICE, torch.int32)


def check(
    q_lens,
    cached,
    num_q_heads,
    num_kv_heads,
    head_dim,
    block_size,
    dtype,
    window=None,
    tma=None,
    fp8=False,
    softcap=None,
):
    context_lens = [a + b for a, b in zip(q_lens, cached, strict=True)]
    k, v, tables, rows = make_cache(context_lens, block_size, num_kv_heads, head_dim, dtype)
    k, v, kv_scales = to_fp8(k, v) if fp8 else (k, v, None)
    fused = torch.randn((sum(q_lens), num_q_heads + 2 * num_kv_heads, head_dim), device=DEVICE).to(dtype)
    q = fused[:, :num_q_heads]  # strided, as a view of a fused projection is
    cu = torch.tensor([0, *q_lens], device=DEVICE).cumsum(0).to(torch.int32)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    args = (k, v, tables, rows, cu, lens, head_dim**-0.5)
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=DEVICE)
    options = {"window": window, "kv_scales": kv_scales, "softcap": softcap}
    paged_prefill(q, *args, out=out, tma=tma, **options)
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    expected = paged_prefill_reference(q.to(wide), k, v, *args[2:], **options)
    assert out.dtype == dtype
    assert out.is_contiguous()
    error = (out.to(wide) - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_and_types(dtype, head_dim):
    check([33, 1, 70], [0, 50, 17], 4, 2, head_dim, 16, dtype)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(2, 2), (2, 1), (3, 1), (7, 1), (8, 1), (10, 2)])
def test_group_ratios(num_q_heads, num_kv_heads):
    check([1, 40, 25], [64, 0, 31], num_q_heads, num_kv_heads, 64, 32, torch.float32)


@pytest.mark.parametrize("block_size", [16, 48, 64, 112, 256])
def test_block_sizes(block_size):
    check([1, 65, 16], [block_size, 2 * block_size - 1, 0], 4, 2, 64, block_size, torch.float16)


def test_many_single_tokens_around_a_chunk():
    """A mixed batch: more sequences than one step of the tile search reads."""
    q_lens = [1] * 260
    q_lens[150] = 40
    check(q_lens, [i % 23 for i in range(260)], 2, 1, 64, 16, torch.float32)


@pytest.mark.parametrize("window", [1, 31, 32, 33, 64, 100])
def test_window_edges(window):
    """Whole prompts, chunks and single tokens around the window's length; rows of one tile see different tiles."""
    lens = [max(window + step, 1) for step in (-1, 0, 1)]
    check([*lens, *lens, 1, 1, 70], [0, 0, 0, 5, 70, 200, window, window - 1, 150], 3, 1, 64, 16, torch.float32, window)


@pytest.mark.parametrize("block_size", [48, 64, 256])
def test_window_in_other_block_sizes_and_in_half_precision(block_size):
    check([1, 200, 16], [300, 150, 129], 4, 2, 80, block_size, torch.float16, 130)


def test_the_reference_with_a_window_is_attention_over_the_last_keys_alone():
    k, v, tables, rows = make_cache([50], 16, 1, 64, torch.float64)
    q = torch.randn(3, 2, 64, dtype=torch.float64, device=DEVICE)
    cu, lens = torch.tensor([0, 3], device=DEVICE), torch.tensor([50], device=DEVICE)
    out = paged_prefill_reference(q, k, v, tables, rows, cu, lens, 0.1, window=18)
    for i in range(3):
        seen = torch.arange(47 + i - 17, 47 + i + 1, device=DEVICE)
        blocks = tables[rows[0], seen // 16].long()
        weights = (q[i] @ k[blocks, seen % 16, 0].T * 0.1).softmax(-1)
        torch.testing.assert_close(out[i], weights @ v[blocks, seen % 16, 0])


@pytest.mark.parametrize("window", [None, 1, 64, 130])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 64), (128, 128), (256, 64)])
def test_copy_engine(head_dim, block_size, window):
    """Prompts and chunks whose tiles of keys are all visible, partly visible and cut by a window."""
    check([1, 200, 16, 64, 63], [300, 0, 129, 64, 1], 3, 1, head_dim, block_size, torch.float16, window, tma=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 64), (96, 48), (128, 256), (256, 16)])
def test_float8_cache(dtype, head_dim, block_size):
    check([33, 1, 70], [0, 50, 17], 4, 2, head_dim, block_size, dtype, fp8=True)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("window", [None, 40, 130])
def test_float8_cache_with_windows_and_through_the_copy_engine(window, tma):
    check([1, 200, 16, 64], [300, 0, 129, 64], 3, 1, 128, 64, torch.bfloat16, window, tma, fp8=True)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "window", "fp8"),
    in_pairs([torch.float32, torch.float16, BF16], [(64, None), (80, 40), (256, None)], [False, True]),
)
def test_soft_cap(dtype, head_dim, window, fp8):
    check([33, 1, 70], [0, 50, 17], 4, 2, head_dim, 16, dtype, window, fp8=fp8, softcap=1.5)


@pytest.mark.parametrize("window", [None, 130])
def test_soft_cap_through_the_copy_engine(window):
    check([1, 200, 16, 64, 63], [300, 0, 129, 64, 1], 3, 1, 64, 64, torch.float16, window, tma=True, softcap=1.5)


def test_scores_far_beyond_the_soft_cap():
    """Exponentials that overflow and vanish."""
    check([33, 1, 70], [0, 50, 17], 4, 2, 64, 16, torch.float32, softcap=1e-3)


def test_first_token_alone():
    check([1], [0], 2, 1, 64, 16, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("fp8", [False, True])
def test_long(dtype, head_dim, block_size, fp8):
    check([1, 1000, 3, 2048, 1, 517], [5000, 0, 129, 1111, 0, 7], 16, 8, head_dim, block_size, dtype, fp8=fp8)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(14, 2), (9, 3), (40, 8), (8, 8)])
def test_long_group_ratios(num_q_heads, num_kv_heads):
    check([1, 777, 64], [300, 1000, 0], num_q_heads, num_kv_heads, 128, 256, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("window", [512, 1000])
def test_long_windows(dtype, head_dim, window):
    q_lens, cached = [1, 1000, 3, 2048, 1, 517, window], [5000, 0, window - 1, 1111, 0, 7, 0]
    for block_size in (16, 256):
        check(q_lens, cached, 8, 4, head_dim, block_size, dtype, window)


@pytest.mark.gpu
def test_longest_context():
    check([100, 1], [131072 - 100, 131071], 4, 2, 128, 256, torch.bfloat16)


def test_sequences_without_context_are_left_out():
    """Their tokens stand among the others, as decodes do in a graph; sequences without tokens follow the last."""
    lens, q_lens = [0, 90, 70, 0, 0], [37, 40, 70, 0, 0]
    k, v, tables, rows = make_cache([1, 90, 70, 1, 1], 16, 2, 64, torch.float32)
    q = torch.randn((160, 6, 64), device=DEVICE)
    cu = torch.tensor([0, *q_lens], device=DEVICE).cumsum(0).to(torch.int32)
    out = torch.full(q.shape, 7.0, device=DEVICE)
    paged_prefill(q, k, v, tables, rows, cu, torch.tensor(lens, dtype=torch.int32, device=DEVICE), 0.125, out=out)
    own = torch.tensor([0, 40, 110], dtype=torch.int32, device=DEVICE)
    context = torch.tensor(lens[1:3], dtype=torch.int32, device=DEVICE)
    expected = paged_prefill_reference(q[37:147].double(), k, v, tables, rows[1:3], own, context, 0.125)
    torch.testing.assert_close(out[37:147].double(), expected, atol=1e-5, rtol=1e-5)
    assert (out[:37] == 7).all()
    assert (out[147:] == 7).all()
