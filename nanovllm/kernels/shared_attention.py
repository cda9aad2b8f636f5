"""The first pass of decode attention over shared prefixes: keys that many sequences name are read once for all.

A work item is a run of keys and up to `members_per_tile` sequences whose block tables begin with the same blocks up to
its end. All their query heads of one KV head stand in one tile, so that K and V pass through the tensor cores once.
Each (sequence, item) leaves a normalised part and the log2 of its exponential sum; decode attention, the second
pass, skips the keys that the first has seen and merges the parts with its own.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.decode_plan import DecodePlan
from nanovllm.kernels.fp8_kv import scale_query
from nanovllm.kernels.prefill_attention import add_tile, cache_tiles, can_use_tma
from nanovllm.kernels.shared_prefixes import ITEM_FIELDS, TILE_ROWS, SharedPrefixes
from nanovllm.kernels.softcap import soft_cap

LOG2_E = 1.4426950408889634


@triton.jit(
    do_not_specialize=["table_stride", "first_slot"],
    do_not_specialize_on_alignment=["table_ptr", "items_ptr", "members_ptr", "bases_ptr", "count_ptr"],
)
def _shared_kernel(
    q_ptr, k_ptr, v_ptr, k_tiles, v_tiles, table_ptr, items_ptr, count_ptr, members_ptr, bases_ptr, partial_ptr,
    lse_ptr, scales_ptr, table_stride, first_slot,
    Q_TOKEN_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr, KV_BLOCK_STRIDE: tl.constexpr,
    KV_TOKEN_STRIDE: tl.constexpr, KV_HEAD_STRIDE: tl.constexpr, SCALE_LOG2: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr, FIELDS: tl.constexpr,
    TMA: tl.constexpr, PDL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One program: one KV head and some work items. Row r of a tile is query head r % GROUP of member r // GROUP.

    `k_tiles`, `v_tiles`, `scales_ptr`, TMA, SOFTCAP: as for prefill attention. Dependents are let go after the wait:
    they may count on all that this kernel waited for.
    """
    SCORE_LOG2: tl.constexpr = 1.0 if SOFTCAP is not None else SCALE_LOG2
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    k_base = k_ptr + kv_head.to(tl.int64) * KV_HEAD_STRIDE
    v_base = v_ptr + kv_head.to(tl.int64) * KV_HEAD_STRIDE
    head = kv_head * GROUP + rows % GROUP
    for item in range(tl.program_id(1), tl.load(count_ptr), tl.num_programs(1)):
        record = items_ptr + item * FIELDS
        table = table_ptr + tl.load(record).to(tl.int64) * table_stride
        start = tl.load(record + 1)
        end = tl.load(record + 2)
        part = tl.load(record + 3)
        members = members_ptr + tl.load(record + 4)
        num_members = tl.load(record + 5)

        live = rows < num_members * GROUP
        seq = tl.load(members + rows // GROUP, mask=live, other=0)
        mask = live[:, None] & (dims < HEAD_DIM)[None, :]
        q_offsets = seq.to(tl.int64) * Q_TOKEN_STRIDE + head * Q_HEAD_STRIDE
        q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        if scales_ptr is not None:
            q = scale_query(q, tl.load(scales_ptr + kv_head))

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(table + start // BLOCK_SIZE)
        for tile_start in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
            if TMA:
                slot = block * BLOCK_SIZE + tile_start % BLOCK_SIZE
                block = tl.load(table + tl.minimum(tile_start + BLOCK_N, end - 1) // BLOCK_SIZE)
                k = k_tiles.load([slot, kv_head * HEAD_DIM]).T
                v = v_tiles.load([slot, kv_head * HEAD_DIM])
            else:
                if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies inside one block, and a run of keys is whole tiles
                    offsets = block.to(tl.int64) * KV_BLOCK_STRIDE + (tile_start % BLOCK_SIZE + lanes) * KV_TOKEN_STRIDE
                    block = tl.load(table + tl.minimum(tile_start + BLOCK_N, end - 1) // BLOCK_SIZE)
                else:  # lanes past the end read the last key again
                    keys = tl.minimum(tile_start + lanes, end - 1)
                    blocks = tl.load(table + keys // BLOCK_SIZE)
                    offsets = blocks.to(tl.int64) * KV_BLOCK_STRIDE + (keys % BLOCK_SIZE) * KV_TOKEN_STRIDE
                k = tl.load(k_base + offsets[None, :] + dims[:, None], mask=(dims < HEAD_DIM)[:, None], other=0.0)
                v = tl.load(v_base + offsets[:, None] + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)
            if scales_ptr is not None:
                k = k.to(q.dtype)
                v = v.to(q.dtype)
            scores = tl.dot(q, k, input_precision=PRECISION)
            if SOFTCAP is not None:
                scores = soft_cap(scores, SCALE_LOG2, SOFTCAP)
            if BLOCK_SIZE % BLOCK_N != 0:
                scores = tl.where((tile_start + lanes < end)[None, :], scores, float("-inf"))
            acc, row_max, row_sum = add_tile(scores, v, acc, row_max, row_sum, SCORE_LOG2, PRECISION)

        if scales_ptr is not None:
            acc *= tl.load(scales_ptr + NUM_KV_HEADS + kv_head)
        place = first_slot + tl.load(bases_ptr + seq, mask=live, other=0) + part
        places = place.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
        tl.store(partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], acc / row_sum[:, None], mask=mask)
        tl.store(lse_ptr + places, row_max * SCORE_LOG2 + tl.log2(row_sum), mask=live)


def tile_config(group: int, head_dim: int, itemsize: int, block_size: int) -> tuple[int, int, int, int]:
    """(tile rows, keys, warps, pipeline stages) of a program; the keys divide the grain of the host's splits."""
    rows = max(TILE_ROWS, triton.next_power_of_2(group))
    if itemsize == 4:  # exact float32 runs on the FMA units and holds twice the bytes in shared memory
        return (rows, 32, 8, 1) if head_dim <= 128 else (rows, 16, 8, 1)
    if head_dim > 128:
        return rows, 32, 4, 2
    return rows, 64, 4, 3 if block_size % 64 == 0 else 5


def shared_parts(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    shared: SharedPrefixes[torch.Tensor],
    plan: DecodePlan,
    pdl: bool = False,
    kv_scales: torch.Tensor | None = None,
    softcap: float | None = None,
    tma: bool | None = None,
    config: tuple[int, int, int, int] | None = None,
) -> None:
    """Attention of one new token per sequence to the shared keys alone, into the plan's workspace.

    q, k_cache, v_cache, block_tables, scale, pdl, kv_scales, softcap: as for `paged_decode`, which has to follow
    shared: this batch's
    tma: fetch keys and values through the copy engine; by default wherever it can
    config: `tile_config`'s, for tuning
    """
    _, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    block_stride, token_stride, head_stride, _ = k_cache.stride()
    group = num_q_heads // num_kv_heads
    rows, keys, num_warps, num_stages = config or tile_config(group, head_dim, q.element_size(), block_size)
    if tma is None:
        tma = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (9, 0) and can_use_tma(k_cache)
    _shared_kernel[(num_kv_heads, plan.shared_wave)](
        q,
        k_cache,
        v_cache,
        cache_tiles(k_cache, keys) if tma else k_cache,
        cache_tiles(v_cache, keys) if tma else v_cache,
        block_tables,
        shared.items,
        shared.count,
        shared.members,
        shared.bases,
        plan.partial,
        plan.lse,
        kv_scales,
        block_tables.stride(0),
        plan.capacity,
        Q_TOKEN_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        KV_BLOCK_STRIDE=block_stride,
        KV_TOKEN_STRIDE=token_stride,
        KV_HEAD_STRIDE=head_stride,
        SCALE_LOG2=scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=rows,
        BLOCK_N=keys,
        BLOCK_SIZE=block_size,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        NUM_STAGES=num_stages,
        FIELDS=ITEM_FIELDS,
        TMA=tma,
        PDL=pdl,
        SOFTCAP=softcap,
        num_warps=num_warps,
        launch_pdl=pdl,
    )
