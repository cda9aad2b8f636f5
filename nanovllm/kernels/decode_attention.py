"""Attention of one new token per sequence over a paged KV cache, for CUDA graphs.

The cache of long sequences is cut into splits that run side by side; `decode_plan` says where.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.decode_plan import ITEM_FIELDS, DecodePlan
from nanovllm.kernels.fp8_kv import scale_query, split_pairs
from nanovllm.kernels.reference import soft_cap_
from nanovllm.kernels.softcap import soft_cap

LOG2_E = 1.4426950408889634
MERGE_ELEMENTS = 2048  # of partial outputs that a merging program loads at a time


@triton.jit
def _merge(
    out, partial, lse, first, splits, shared_first, shared,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PADDED_GROUP: tl.constexpr, ROWS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one sequence and KV head by their log-sums; `partial` and `lse` point at its first query head.

    The parts are `splits` of its own from `first` on, and `shared` ones from `shared_first` on.
    A row of the tile is a (split, head of the group) pair and keeps a maximum of its own, so that no load waits for
    a result; the rows of a head come together at the end. A row that met no split stays at LOWEST, which is finite.
    """
    LOWEST: tl.constexpr = -1e30
    SPLITS: tl.constexpr = ROWS // PADDED_GROUP
    dims = tl.arange(0, BLOCK_D)
    row = tl.arange(0, ROWS)
    best = tl.full([ROWS], LOWEST, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for chunk in tl.range(0, splits + shared, SPLITS, num_stages=NUM_STAGES):
        split = chunk + row // PADDED_GROUP
        live = (split < splits + shared) & (row % PADDED_GROUP < GROUP)
        part = tl.where(split < splits, first + split, shared_first + split - splits)
        slot = part.to(tl.int64) * (NUM_KV_HEADS * GROUP) + row % PADDED_GROUP
        # Other programs wrote these: no use in the L1 cache.
        sums = tl.load(lse + slot, mask=live, other=LOWEST, cache_modifier=".cg")
        part_mask = live[:, None] & (dims < HEAD_DIM)[None, :]
        part_ptrs = partial + slot[:, None] * HEAD_DIM + dims[None, :]
        parts = tl.load(part_ptrs, mask=part_mask, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, sums)
        rescale = tl.exp2(best - new_best)
        weights = tl.exp2(sums - new_best)
        norm = norm * rescale + weights
        acc = acc * rescale[:, None] + parts * weights[:, None]
        best = new_best
    best = tl.reshape(best, [SPLITS, PADDED_GROUP])
    weights = tl.exp2(best - tl.max(best, 0)[None, :])
    norm = tl.sum(tl.reshape(norm, [SPLITS, PADDED_GROUP]) * weights, 0)
    acc = tl.sum(tl.reshape(acc, [SPLITS, PADDED_GROUP, BLOCK_D]) * weights[:, :, None], 0)
    head = tl.arange(0, PADDED_GROUP)
    mask = (head < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    out_ptrs = out + head[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, (acc / norm[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, items_ptr, count_ptr, partial_ptr, lse_ptr, arrived_ptr, scales_ptr,
    table_stride,
    Q_TOKEN_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr, KV_BLOCK_STRIDE: tl.constexpr,
    KV_TOKEN_STRIDE: tl.constexpr, KV_HEAD_STRIDE: tl.constexpr, SCALE_LOG2: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    MERGE_GROUP: tl.constexpr, MERGE_ROWS: tl.constexpr, FIELDS: tl.constexpr, WINDOW: tl.constexpr,
    SHARED: tl.constexpr, SPARSE: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One program: one KV head, its GROUP query heads, and one work item (a split of one sequence).

    A sequence of one split is written at once. Of several, each leaves its normalised part and the log2 of its
    exponential sum in the workspace, and the last to arrive merges them: no second launch. In either case the parts
    that the pass over shared prefixes has left are merged in. `scales_ptr`: of a cache in float8, see `fp8_kv`.
    SOFTCAP: None, or the cap.
    """
    # Before the wait only what is older than the launch before this one is read, and nothing is written: the work list
    # and block tables, with SHARED all but that launch's parts (from L2: the L1 cache may be older than its own wait).
    WAIT_FIRST: tl.constexpr = PDL and not SHARED
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    CACHE: tl.constexpr = ".cg" if SHARED else ""
    if SPARSE:  # noqa: SIM102  # many programs have nothing to do: they leave before they load what the others need
        if item >= tl.load(count_ptr, cache_modifier=CACHE):
            if WAIT_FIRST:  # who waits for this launch relies on it to have waited
                tl.extra.cuda.gdc_wait()
            return
    record = items_ptr + item * FIELDS
    seq = tl.load(record, cache_modifier=CACHE)
    row = tl.load(record + 1, cache_modifier=CACHE)
    start = tl.load(record + 2, cache_modifier=CACHE)
    end = tl.load(record + 3, cache_modifier=CACHE)
    first = tl.load(record + 4, cache_modifier=CACHE)
    splits = tl.load(record + 5, cache_modifier=CACHE)
    shared_first, shared = 0, 0
    if SHARED:
        shared_first = tl.load(record + 6, cache_modifier=CACHE)
        shared = tl.load(record + 7, cache_modifier=CACHE)
    if WINDOW:  # an item's first grain holds a visible key, but its first tile need not
        visible = tl.load(record + 6)
        start = tl.maximum(start, visible // BLOCK_N * BLOCK_N)
    table = table_ptr + row.to(tl.int64) * table_stride
    count = item + 1 if SPARSE else tl.load(count_ptr, cache_modifier=CACHE)
    if BLOCK_SIZE % BLOCK_N == 0:  # a record beyond the count is left of an older list
        block = tl.load(table + start // BLOCK_SIZE, mask=item < count, other=0, cache_modifier=CACHE)
    if WAIT_FIRST:
        tl.extra.cuda.gdc_wait()
    if item >= count:
        return

    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    mask = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = seq.to(tl.int64) * Q_TOKEN_STRIDE + head * Q_HEAD_STRIDE
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=mask, other=0.0, cache_modifier=CACHE)
    FP8: tl.constexpr = scales_ptr is not None
    if FP8:
        q = scale_query(q, tl.load(scales_ptr + kv_head))
    k_base = k_ptr + kv_head.to(tl.int64) * KV_HEAD_STRIDE
    v_base = v_ptr + kv_head.to(tl.int64) * KV_HEAD_STRIDE
    if FP8:  # pairs of dimensions
        v_base = v_base.to(tl.pointer_type(tl.int16))
        pairs = tl.arange(0, BLOCK_D // 2)

    acc = tl.zeros([GROUP_PAD, BLOCK_D // 2 if FP8 else BLOCK_D], tl.float32)
    if FP8:
        acc_odd = tl.zeros([GROUP_PAD, BLOCK_D // 2], tl.float32)
    row_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP_PAD], tl.float32)
    for tile_start in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
        keys = tile_start + lanes
        in_range = keys < end
        if WINDOW:
            in_range &= keys >= visible
        if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies inside one block: one table entry, contiguous rows
            offsets = block.to(tl.int64) * KV_BLOCK_STRIDE + (tile_start % BLOCK_SIZE + lanes) * KV_TOKEN_STRIDE
            if FP8:
                pair_offsets = block.to(tl.int64) * (KV_BLOCK_STRIDE // 2)
                pair_offsets += (tile_start % BLOCK_SIZE + lanes) * (KV_TOKEN_STRIDE // 2)
            # Loaded one step early: a load that K's address needs in the same step would use up the pipeline's stages.
            block = tl.load(table + tl.minimum(tile_start + BLOCK_N, end - 1) // BLOCK_SIZE, cache_modifier=CACHE)
        else:  # table columns past the last key hold anything
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=in_range, other=0, cache_modifier=CACHE)
            offsets = blocks.to(tl.int64) * KV_BLOCK_STRIDE + (keys % BLOCK_SIZE) * KV_TOKEN_STRIDE
            if FP8:
                pair_offsets = blocks.to(tl.int64) * (KV_BLOCK_STRIDE // 2)
                pair_offsets += (keys % BLOCK_SIZE) * (KV_TOKEN_STRIDE // 2)
        # Values past the end must be zero, not just weighted by zero: unused cache slots may hold NaN.
        k_mask = in_range[None, :] & (dims < HEAD_DIM)[:, None]
        v_mask = in_range[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_base + offsets[None, :] + dims[:, None], mask=k_mask, other=0.0, cache_modifier=CACHE)
        if FP8:
            k = k.to(q.dtype)
            pair_mask = in_range[:, None] & (pairs < HEAD_DIM // 2)[None, :]
            pair_ptrs = v_base + pair_offsets[:, None] + pairs[None, :]
            v, v_odd = split_pairs(tl.load(pair_ptrs, mask=pair_mask, other=0, cache_modifier=CACHE), q, NATIVE)
        else:
            v = tl.load(v_base + offsets[:, None] + dims[None, :], mask=v_mask, other=0.0, cache_modifier=CACHE)
        scores = tl.dot(q, k, input_precision=PRECISION)
        if SOFTCAP is not None:
            scores = soft_cap(scores, SCALE_LOG2, SOFTCAP)
        else:
            scores *= SCALE_LOG2
        scores = tl.where(in_range[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))  # finite: a tile holds at least one key
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        if FP8:
            acc_odd = tl.dot(weights.to(v.dtype), v_odd, acc_odd * rescale[:, None], input_precision=PRECISION)

    if FP8:  # parts, too, are in the values' own scale
        acc = tl.interleave(acc, acc_odd) * tl.load(scales_ptr + NUM_KV_HEADS + kv_head)
    if SHARED:
        if PDL:
            tl.extra.cuda.gdc_wait()
        if splits == 1:
            first_part = shared_first * NUM_KV_HEADS * GROUP + head
            for part in tl.range(0, shared, num_stages=NUM_STAGES):
                slot = first_part + part * NUM_KV_HEADS * GROUP
                sums = tl.load(lse_ptr + slot, mask=member < GROUP, other=0.0, cache_modifier=".cg")
                part_ptrs = partial_ptr + slot[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
                parts = tl.load(part_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
                new_max = tl.maximum(row_max, sums)
                rescale = tl.exp2(row_max - new_max)
                weights = tl.exp2(sums - new_max)
                row_sum = row_sum * rescale + weights
                acc = acc * rescale[:, None] + parts * weights[:, None]
                row_max = new_max

    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # zeros for an empty sequence
    out_offsets = (seq.to(tl.int64) * NUM_KV_HEADS * GROUP + head) * HEAD_DIM
    if splits == 1:
        tl.store(out_ptr + out_offsets[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
        return

    lse = row_max + tl.log2(row_sum)
    slot = item * NUM_KV_HEADS * GROUP + head
    tl.store(partial_ptr + slot[:, None].to(tl.int64) * HEAD_DIM + dims[None, :], acc, mask=mask)
    tl.store(lse_ptr + slot, lse, mask=member < GROUP)
    # All threads' stores come before the barrier, one thread's release after it: the last program sees every part.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr + seq * NUM_KV_HEADS + kv_head, 1, sem="acq_rel")
    if arrived == splits - 1:
        tl.store(arrived_ptr + seq * NUM_KV_HEADS + kv_head, 0)  # ready for the next layer
        _merge(
            out_ptr + (seq.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP * HEAD_DIM,
            partial_ptr + kv_head * GROUP * HEAD_DIM, lse_ptr + kv_head * GROUP, first, splits, shared_first, shared,
            NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, MERGE_GROUP, MERGE_ROWS, NUM_STAGES,
        )  # fmt: skip


def tile_config(head_dim: int, itemsize: int, block_size: int, shared: bool, fp8: bool) -> tuple[int, int, int]:
    """(keys, warps, pipeline stages) of a program, as measured on an H200; the keys divide a plan's grain.

    What is left of a sequence after a shared prefix is short: several small programs a multiprocessor read it faster.
    """
    if itemsize == 4:  # exact float32 runs on the FMA units and holds twice the bytes in shared memory
        return (32, 4, 2) if head_dim <= 128 else (16, 4, 2)
    if head_dim > 128 or (shared and block_size % 32 == 0):
        return 32, 2, 3
    if fp8 and block_size % 64 == 0:
        return 64, 2, 2
    return 64, 2, 3 if block_size % 64 == 0 else 5  # a gather's table loads take every other stage


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    plan: DecodePlan,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    shared: bool = False,
    kv_scales: torch.Tensor | None = None,
    softcap: float | None = None,
    sparse: bool = False,
    config: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Attention of one new token per sequence over its context (its plan's window); `plan.update` has seen this batch.

    q: [batch, num_q_heads, head_dim], any token and head stride
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], the new tokens' keys and values included
    block_tables: [num_rows, max_blocks] int32; columns past a sequence's last block are never read
    out: where to write, contiguous; new by default
    pdl: programmatic dependent launch: overlap the end of the launch before this one
    shared: `plan.update` was told of shared prefixes, and `shared_parts` has seen to them
    kv_scales: [2, num_kv_heads] float32, of a cache in float8: of keys, then of values
    softcap: soft cap of the scores (`softcap.soft_cap`); None: none
    sparse: as `plan.update` was told
    config: `tile_config`'s, for tuning
    Returns [batch, num_q_heads, head_dim], contiguous, in q's dtype. Empty sequences get zeros or, if sparse, nothing.
    """
    batch, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    block_stride, token_stride, head_stride, _ = k_cache.stride()
    group = num_q_heads // num_kv_heads
    fp8 = kv_scales is not None
    block_n, num_warps, num_stages = config or tile_config(head_dim, q.element_size(), block_size, shared, fp8)
    padded_group, padded_dim = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    if out is None:
        out = torch.empty((batch, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    _decode_kernel[(num_kv_heads, plan.max_items(batch, shared, sparse))](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        plan.items,
        plan.count,
        plan.partial,
        plan.lse,
        plan.arrived,
        kv_scales,
        block_tables.stride(0),
        Q_TOKEN_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        KV_BLOCK_STRIDE=block_stride,
        KV_TOKEN_STRIDE=token_stride,
        KV_HEAD_STRIDE=head_stride,
        SCALE_LOG2=scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, padded_group),
        HEAD_DIM=head_dim,
        BLOCK_D=padded_dim,
        BLOCK_N=block_n,
        BLOCK_SIZE=block_size,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        NUM_STAGES=num_stages,
        MERGE_GROUP=padded_group,
        MERGE_ROWS=max(MERGE_ELEMENTS // padded_dim, padded_group),
        FIELDS=ITEM_FIELDS,
        WINDOW=plan.window or 0,
        SHARED=shared,
        SPARSE=sparse,
        PDL=pdl,
        NATIVE=q.is_cuda and q.dtype != torch.float32,
        SOFTCAP=softcap,
        num_warps=num_warps,
        launch_pdl=pdl,
    )
    return out


def paged_decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """`DecodePlan.update` and `paged_decode` in plain torch, float32 inside (float64 for such a q)."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for i, (row, context_len) in enumerate(zip(rows.tolist(), context_lens.tolist(), strict=True)):
        if context_len == 0:
            continue
        blocks = block_tables[row, : -(-context_len // block_size)].long()
        k, v = (c[blocks].flatten(0, 1)[:context_len].to(dtype).transpose(0, 1) for c in (k_cache, v_cache))
        if kv_scales is not None:
            k, v = k * kv_scales[0, :, None, None], v * kv_scales[1, :, None, None]
        heads = q[i].to(dtype).unflatten(0, (num_kv_heads, -1))  # [num_kv_heads, group, head_dim]
        scores = heads @ k.transpose(-1, -2) * scale
        if softcap is not None:
            soft_cap_(scores, softcap)
        if window is not None:
            scores[..., : max(context_len - window, 0)] = float("-inf")
        weights = scores.softmax(-1)
        out[i] = (weights @ v).flatten(0, 1).to(q.dtype)
    return out
