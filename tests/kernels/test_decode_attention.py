"""Decode attention against its plain-torch reference, on fresh random inputs with poison in everything unused."""

import pytest
import torch

from nanovllm.kernels.decode_attention import paged_decode, paged_decode_reference
from nanovllm.kernels.decode_plan import DecodePlan
from nanovllm.kernels.reference import FP8
from tests.cases import in_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter's dot takes its bits for integers
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative error in the 2-norm


def to_fp8(k, v):
    """A cache in float8 with a scale per head, of keys and of values, and these [2, num_kv_heads]."""
    scales = torch.exp2(torch.randint(-5, 6, (2, k.shape[2]), device=DEVICE).float())
    return *((c / s[:, None]).to(FP8) for c, s in zip((k, v), scales, strict=True)), scales


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


def make_plan(max_batch, num_q_heads, num_kv_heads, head_dim):
    """A plan with a poisoned workspace."""
    plan = DecodePlan.create(max_batch, num_q_heads, num_kv_heads, head_dim, DEVICE)
    plan.partial.fill_(float("nan"))
    plan.lse.fill_(float("nan"))
    plan.items.fill_(2**30)
    return plan


def make_q(batch, num_q_heads, num_kv_heads, head_dim, dtype):
    """Queries as a strided view of a fused projection."""
    fused = torch.randn((batch, num_q_heads + 2 * num_kv_heads, head_dim), device=DEVICE).to(dtype)
    return fused[:, :num_q_heads]


def compare(out, q, k, v, tables, rows, lens, scale, window=None, kv_scales=None, softcap=None):
    wide = torch.float64 if q.dtype == torch.float32 else torch.float32
    expected = paged_decode_reference(q.to(wide), k, v, tables, rows, lens, scale, window, kv_scales, softcap)
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    error = (out.to(wide) - expected).norm() / expected.norm()
    assert error < TOLERANCE[q.dtype], f"relative error {error:.2e}"


def check(context_lens, num_q_heads, num_kv_heads, head_dim, block_size, dtype, plan=None, fp8=False, softcap=None):
    batch = len(context_lens)
    k, v, tables, rows = make_cache(context_lens, block_size, num_kv_heads, head_dim, dtype)
    k, v, kv_scales = to_fp8(k, v) if fp8 else (k, v, None)
    q = make_q(batch, num_q_heads, num_kv_heads, head_dim, dtype)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    plan = plan or make_plan(batch + 3, num_q_heads, num_kv_heads, head_dim)
    plan.update(rows, lens)
    poison = torch.full(q.shape, float("nan"), dtype=dtype, device=DEVICE)
    del poison  # the allocator hands this memory to the output
    out = paged_decode(q, k, v, tables, head_dim**-0.5, plan, kv_scales=kv_scales, softcap=softcap)
    compare(out, q, k, v, tables, rows, lens, head_dim**-0.5, plan.window, kv_scales, softcap)
    assert not plan.arrived.any(), "the counters must be zero for the next layer"
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_and_types(dtype, head_dim):
    check([1, 300, 64, 17], 4, 2, head_dim, 16, dtype)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(2, 2), (2, 1), (3, 1), (7, 1), (8, 1), (10, 2), (17, 1)])
def test_group_ratios(num_q_heads, num_kv_heads):
    check([130, 1, 200], num_q_heads, num_kv_heads, 64, 32, torch.float32)


@pytest.mark.parametrize("block_size", [16, 48, 64, 112, 256])
def test_block_sizes(block_size):
    check([block_size, 2 * block_size + 1, block_size - 1, 600], 4, 2, 64, block_size, torch.float16)


def test_a_plan_serves_batches_and_layers_in_turn():
    plan = make_plan(300, 2, 1, 64)
    for lens in ([700], [5, 1, 260], [1 + i % 7 for i in range(40)], [900, 1]):
        check(lens, 2, 1, 64, 16, torch.float32, plan)


def test_empty_and_padded_rows_do_no_harm():
    out = check([0, 150, 0, 1, 1], 2, 1, 64, 16, torch.float32)
    assert not out[0].any()
    assert not out[2].any()


@pytest.mark.parametrize("window", [1, 20, 64, 100, 257])
def test_window_edges(window):
    plan = make_plan(9, 2, 1, 64).with_window(window)
    lens = [max(window + step, 0) for step in (-1, 0, 1, 15, 16, 63, 64, 700)]
    check([*lens, 0], 2, 1, 64, 16, torch.float32, plan)


@pytest.mark.parametrize("block_size", [48, 64, 256])
def test_window_in_other_block_sizes_and_in_half_precision(block_size):
    plan = make_plan(5, 4, 2, 80).with_window(130)
    check([129, 130, 131, 600, 1], 4, 2, 80, block_size, torch.float16, plan)


def test_the_reference_with_a_window_is_attention_over_the_last_keys_alone():
    k, v, tables, rows = make_cache([50], 16, 1, 64, torch.float64)
    lens, q = torch.tensor([50], device=DEVICE), make_q(1, 2, 1, 64, torch.float64)
    out = paged_decode_reference(q, k, v, tables, rows, lens, 0.1, 18)
    last = torch.arange(32, 50, device=DEVICE)
    blocks = tables[rows[0], last // 16].long()
    weights = (q[0] @ k[blocks, last % 16, 0].T * 0.1).softmax(-1)
    torch.testing.assert_close(out[0], weights @ v[blocks, last % 16, 0])


def test_plans_of_two_windows_share_a_workspace_in_turn():
    plan = make_plan(4, 2, 1, 64)
    windowed = plan.with_window(100)
    assert windowed.partial is plan.partial
    for lens in ([700, 3, 90], [101, 1000, 260]):
        check(lens, 2, 1, 64, 16, torch.float32, plan)
        check(lens, 2, 1, 64, 16, torch.float32, windowed)


MANY = list(range(0, 1300, 5))  # more than one step of the plan reads


@pytest.mark.parametrize(
    ("lens", "window"),
    [([1], None), ([131072], None), ([1, 131072, 0, 64, 65], None), (MANY, None), ([1, 5000, 0, 1000, 1001], 1000)],
)
def test_plan_covers_every_key_once(lens, window):
    """With a window: from the grain that the first visible key is in."""
    plan = make_plan(len(lens), 2, 1, 64)
    if window:
        plan = plan.with_window(window)
    rows = torch.arange(len(lens), dtype=torch.int32, device=DEVICE) + 7
    plan.update(rows, torch.tensor(lens, dtype=torch.int32, device=DEVICE))
    items = plan.items[: int(plan.count)].tolist()
    assert len(items) <= plan.max_items(len(lens))
    at = 0
    for seq, length in enumerate(lens):
        visible = max(length - window, 0) if window else 0
        first, end = at, visible // plan.grain * plan.grain
        while at < len(items) and items[at][0] == seq:
            _, row, start, stop, first_item, splits, first_visible, _ = items[at]
            assert not window or first_visible == visible
            assert (row, start, first_item) == (seq + 7, end, first)
            assert start < stop or length == 0
            at, end = at + 1, stop
        assert end == length
        assert splits == at - first
    assert at == len(items)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 64), (96, 48), (128, 256), (256, 16)])
def test_float8_cache(dtype, head_dim, block_size):
    check([1, 300, 64, 0, 17], 4, 2, head_dim, block_size, dtype, fp8=True)


@pytest.mark.parametrize("window", [20, 64, 257])
def test_float8_cache_with_a_window(window):
    plan = make_plan(4, 6, 2, 64).with_window(window)
    check([window, window + 1, 600, 1], 6, 2, 64, 16, torch.float16, plan, fp8=True)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "window", "fp8"),
    in_pairs([torch.float32, torch.float16, BF16], [(64, None), (80, 100), (256, None)], [False, True]),
)
def test_soft_cap(dtype, head_dim, window, fp8):
    """One split and several, keys before the window and past the end in tiles that are seen."""
    plan = make_plan(6, 4, 2, head_dim)
    plan = plan.with_window(window) if window else plan
    check([1, 300, 64, 0, 17, 700], 4, 2, head_dim, 16, dtype, plan, fp8, 1.5)


def test_scores_far_beyond_the_soft_cap():
    """Exponentials that overflow and vanish: each score is the cap or minus the cap."""
    check([1, 300, 64], 2, 1, 64, 16, torch.float32, softcap=1e-3)
    k, v, tables, rows = make_cache([40], 16, 1, 64, torch.float32)
    lens, plan = torch.tensor([40], dtype=torch.int32, device=DEVICE), make_plan(1, 1, 1, 64)
    k.copy_(torch.where(torch.arange(16, device=DEVICE)[:, None, None] % 2 == 0, 1e5, -1e5))
    plan.update(rows, lens)
    out = paged_decode(torch.ones(1, 1, 64, device=DEVICE), k, v, tables, 1.0, plan, softcap=2.0)
    weights = torch.tensor([2.0, -2.0], device=DEVICE).repeat(20).softmax(0)
    keys = torch.arange(40, device=DEVICE)
    torch.testing.assert_close(out[0, 0], weights @ v[tables[rows[0], keys // 16].long(), keys % 16, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("fp8", [False, True])
def test_long(dtype, head_dim, block_size, fp8):
    check([1, 8000, 2047, 100, 16, 777] * 3, 16, 8, head_dim, block_size, dtype, fp8=fp8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("window", [512, 1000, 4096])
def test_long_windows(dtype, head_dim, window):
    lens = [1, 8000, window - 1, window, window + 1, window + 64, 777] * 3
    plan = make_plan(len(lens), 16, 8, head_dim).with_window(window)
    for block_size in (16, 256):
        check(lens, 16, 8, head_dim, block_size, dtype, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("context_lens", [[131072], [131072, 1, 0, 40000], [600], [1500] * 256])
def test_lengths(context_lens):
    check(context_lens, 16, 8, 128, 256, torch.bfloat16)


@pytest.mark.gpu
def test_graph_replays_with_changed_lengths():
    scale, longest = 128**-0.5, [5000, 4000, 3000]
    k, v, tables, rows = make_cache(longest, 256, 8, 128, torch.bfloat16)
    q = make_q(3, 16, 8, 128, torch.bfloat16)
    lens = torch.ones(3, dtype=torch.int32, device=DEVICE)
    plan = make_plan(3, 16, 8, 128)
    plan.update(rows, lens)
    paged_decode(q, k, v, tables, scale, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(rows, lens)
        outs = [paged_decode(q, k, v, tables, scale, plan) for _ in range(3)]
    for new in (longest, [1, 1, 1], [600, 0, 2999], [64, 65, 129]):
        lens.copy_(torch.tensor(new))
        q.copy_(torch.randn(q.shape, device=DEVICE))
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            compare(out, q, k, v, tables, rows, lens, scale)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_empty", [1, 300])
def test_a_sparse_batch_leaves_empty_sequences_alone(num_empty, window):
    """They cost no work item, so that the others are cut as finely as without them."""
    lens = [300, 1, 700, 64]
    k, v, tables, rows = make_cache([*lens, *[1] * num_empty], 16, 2, 64, torch.float32)
    batch = len(rows)
    q = make_q(batch, 6, 2, 64, torch.float32)
    order = torch.randperm(batch)
    q, rows = q[order.to(DEVICE)], rows[order.to(DEVICE)]
    lens = torch.tensor([*lens, *[0] * num_empty], dtype=torch.int32)[order].to(DEVICE)
    plan = make_plan(batch, 6, 2, 64)
    plan = plan.with_window(window) if window else plan
    plan.update(rows, lens, sparse=True)
    out = torch.full(q.shape, 7.0, device=DEVICE)
    paged_decode(q, k, v, tables, 0.125, plan, out=out, sparse=True)
    some = lens > 0
    compare(out[some], q[some], k, v, tables, rows[some], lens[some], 0.125, window)
    assert (out[~some] == 7).all()
    assert not plan.arrived.any()
    # Of at most MIN_SPLIT keys, or a grain where that fills less than two waves; a window leaves one grain of each.
    pieces = [1, 1, 1, 1] if window else [2, 1, 3, 1] if 2 * plan.wave <= 4 else [5, 1, 11, 1]
    assert int(plan.count) == sum(pieces)
