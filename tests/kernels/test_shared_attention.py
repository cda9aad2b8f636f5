"""Decode attention in two passes, shared prefixes first, against the plain reference, which knows of no sharing."""

import pytest
import torch

from nanovllm.engine.scheduler import Scheduled
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.shared_prefix import SharedPrefixFinder
from nanovllm.kernels.decode_attention import paged_decode
from nanovllm.kernels.decode_plan import DecodePlan
from nanovllm.kernels.shared_attention import shared_parts
from nanovllm.kernels.shared_prefixes import SharedPrefixes
from nanovllm.sampling_params import SamplingParams
from tests.cases import in_pairs
from tests.kernels.test_decode_attention import BF16, DEVICE, compare, make_q, to_fp8


def make_tree(groups, own_lens, block_size):
    """Block tables of sequences that share: `groups` are (first, last + 1, blocks) in nested order.

    Returns (tables, context lengths): each sequence has its groups' blocks, then its own for `own_lens` tokens."""
    tables = [[] for _ in own_lens]
    fresh = iter(torch.randperm(10_000).tolist())
    for first, last, blocks in groups:
        run = [next(fresh) for _ in range(blocks)]
        for i in range(first, last):
            tables[i] = tables[i] + run
    lens = []
    for i, own in enumerate(own_lens):
        lens.append(len(tables[i]) * block_size + own)
        tables[i] = tables[i] + [next(fresh) for _ in range(-(-own // block_size))]
    return tables, lens


def fill_cache(tables, lens, block_size, num_kv_heads, head_dim, dtype):
    """NaN in every slot that holds no key, garbage in unused columns; rows of the device's tables in random order."""
    used = sorted({block for table in tables for block in table})
    number = dict(zip(used, torch.randperm(len(used) + 3).tolist(), strict=False))
    cache = torch.full((2, len(used) + 3, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    rows = torch.randperm(len(tables) + 2)[: len(tables)]
    device_tables = torch.randint(-(2**31), 2**31 - 1, (len(tables) + 2, max(map(len, tables)) + 2), dtype=torch.int64)
    for row, table, n in zip(rows.tolist(), tables, lens, strict=True):
        numbers = torch.tensor([number[block] for block in table])
        device_tables[row, : len(table)] = numbers
        for j, block in enumerate(numbers.tolist()):
            filled = min(n - j * block_size, block_size)
            missing = cache[:, block, :filled].isnan().any()
            if missing:
                cache[:, block, :filled] = torch.randn(2, filled, num_kv_heads, head_dim, device=DEVICE).to(dtype)
    return cache[0], cache[1], device_tables.to(DEVICE, torch.int32), rows


def find(tables, lens, rows, plan, max_batch, group, block_size):
    """The host's work list, on the device; whatever little they share."""
    finder = SharedPrefixFinder(max_batch, plan.shared_wave + max_batch, group, block_size, 2**40, min_run_saving=1)
    items = []
    for i, (table, n, row) in enumerate(zip(tables, lens, rows.tolist(), strict=True)):
        seq = Sequence(i, [0] * n, SamplingParams(), n + 1, 0)
        seq.block_table, seq.row = table, row
        items.append(Scheduled(seq, n - 1, 1, True, 0))
    found = finder.find(items)
    assert found is not None
    assert finder.find(items) is found, "the same batch needs no new list"
    return found


def check(
    groups,
    own_lens,
    num_q_heads,
    num_kv_heads,
    head_dim,
    block_size,
    dtype,
    wave=None,
    tma=None,
    fp8=False,
    softcap=None,
):
    tables, lens = make_tree(groups, own_lens, block_size)
    k, v, device_tables, rows = fill_cache(tables, lens, block_size, num_kv_heads, head_dim, dtype)
    k, v, kv_scales = to_fp8(k, v) if fp8 else (k, v, None)
    batch, max_batch = len(lens), len(lens) + 3
    plan = DecodePlan.create(max_batch, num_q_heads, num_kv_heads, head_dim, DEVICE, share=True)
    if wave is not None:
        plan = DecodePlan(**{**vars(plan), "wave": wave})
    found = find(tables, lens, rows, plan, max_batch, num_q_heads // num_kv_heads, block_size)
    covered = sum(last - first for first, last, _ in groups if last - first > 1)
    assert covered == 0 or int(found.hidden.max()) > 0
    shared = SharedPrefixes(torch.from_numpy(found.packed).to(DEVICE), found.max_batch, found.max_items)
    for workspace in (plan.partial, plan.lse):
        workspace.fill_(float("nan"))
    plan.items.fill_(2**30)
    device_rows = rows.to(DEVICE, torch.int32)
    device_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    q = make_q(batch, num_q_heads, num_kv_heads, head_dim, dtype)
    plan.update(device_rows, device_lens, shared)
    args, options = (q, k, v, device_tables, head_dim**-0.5), {"kv_scales": kv_scales, "softcap": softcap}
    for _ in range(2):  # two layers with one plan
        shared_parts(*args, shared, plan, tma=tma, **options)
        out = paged_decode(*args, plan, shared=True, **options)
        compare(out, q, k, v, device_tables, device_rows, device_lens, head_dim**-0.5, **options)
    assert not plan.arrived.any()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_head_sizes_and_types(dtype, head_dim):
    check([(0, 5, 13)], [1, 16, 17, 40, 3], 4, 2, head_dim, 16, dtype)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(2, 2), (3, 1), (7, 1), (10, 2), (17, 1), (70, 1)])
def test_group_ratios(num_q_heads, num_kv_heads):
    check([(1, 9, 8)], [7] * 10, num_q_heads, num_kv_heads, 64, 32, torch.float16)


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
def test_block_sizes(block_size):
    check([(0, 9, -(-300 // block_size))], [block_size + 1] * 9, 4, 2, 64, block_size, torch.float16)


def test_a_tree_of_prefixes_next_to_sequences_that_share_nothing():
    """Two groups, one of them with a group inside; more members than a tile holds."""
    groups = [(1, 40, 8), (20, 40, 16), (41, 43, 70), (44, 45, 3)]
    found = check(groups, [5 + i for i in range(46)], 4, 2, 64, 16, torch.float32)
    hidden = found.hidden[:46].tolist()
    assert hidden == [0] + [128] * 19 + [128 + 256] * 20 + [0] + [1120] * 2 + [0] * 3


@pytest.mark.parametrize(("wave", "parts"), [(2, 1), (4, 2), (10, 4), (100, 4)])
def test_long_runs_are_split_as_the_gpu_and_the_workspace_have_room(wave, parts):
    found = check([(0, 6, 64)], [9] * 6, 2, 1, 64, 16, torch.float32, wave)
    assert found.parts[:9].tolist() == [parts] * 6 + [0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("fp8", [False, True])
def test_large(dtype, head_dim, block_size, fp8):
    groups, own_lens = [(0, 200, -(-2048 // block_size)), (0, 90, 8)], [1 + i for i in range(220)]
    check(groups, own_lens, 16, 8, head_dim, block_size, dtype, fp8=fp8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "block_size", "tma"), [(64, 16, False), (80, 48, False), (128, 64, True)])
def test_float8_cache(dtype, head_dim, block_size, tma):
    """Own parts of one split and of several beside the shared ones, all in the values' scale."""
    own_lens = [5, 1, 64, 300, 2, 3, 40]
    check([(0, 6, -(-200 // block_size)), (3, 6, 5)], own_lens, 6, 2, head_dim, block_size, dtype, tma=tma, fp8=True)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "tma", "fp8"),
    in_pairs([torch.float32, torch.float16, BF16], [(64, 16, False), (80, 48, False), (128, 64, True)], [False, True]),
)
def test_soft_cap(dtype, head_dim, block_size, tma, fp8):
    """Both passes cap, and their parts are on one scale."""
    groups, tma = [(0, 6, -(-200 // block_size)), (3, 6, 5)], tma and dtype != torch.float32
    check(groups, [5, 1, 64, 300, 2, 40], 6, 2, head_dim, block_size, dtype, tma=tma, fp8=fp8, softcap=1.5)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(14, 2), (9, 3), (40, 8), (8, 8), (64, 1)])
def test_large_group_ratios(num_q_heads, num_kv_heads):
    check([(0, 60, 8), (60, 64, 20)], [1 + i for i in range(70)], num_q_heads, num_kv_heads, 128, 256, torch.bfloat16)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 64), (128, 128), (256, 64)])
def test_copy_engine(head_dim, block_size):
    """Own parts of one split and of several."""
    check(
        [(0, 9, 4), (3, 9, 3)], [5, 1, 64, 300, 40, 2, 3, 4, 5, 6], 6, 2, head_dim, block_size, torch.float16, tma=True
    )
