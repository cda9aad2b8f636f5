"""Attention of one new token per sequence over a paged KV cache, for CUDA graphs.

The cache of long sequences is cut into splits that run side by side; `decode_plan` says where.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.decode_item import attend_item, load_item
from nanovllm.kernels.decode_plan import ITEM_FIELDS, DecodePlan
from nanovllm.kernels.reference import soft_cap_

LOG2_E = 1.4426950408889634
MERGE_ELEMENTS = 2048  # of partial outputs that a merging program loads at a time


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, items_ptr, count_ptr, taken_ptr, partial_ptr, lse_ptr, arrived_ptr,
    scales_ptr, table_stride,
    Q_TOKEN_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr, KV_BLOCK_STRIDE: tl.constexpr,
    KV_TOKEN_STRIDE: tl.constexpr, KV_HEAD_STRIDE: tl.constexpr, SCALE_LOG2: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    MERGE_GROUP: tl.constexpr, MERGE_ROWS: tl.constexpr, FIELDS: tl.constexpr, WINDOW: tl.constexpr,
    SHARED: tl.constexpr, LOOP: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One program: one KV head and one work item, or, in a LOOP, one item after the other until none is left.

    In a loop each program begins with the item of its own number, and takes a further one for each that it begins.
    That makes as many as there are items, so that who takes the last one knows it.
    """
    if PDL:  # what the launch before this one wrote is read, and anything is written, only after the wait
        tl.extra.cuda.gdc_launch_dependents()
        if not SHARED:  # the pass over shared prefixes waited for all but its own parts: they are read at the end
            tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    # What is loaded before the wait comes from L2: the L1 cache may be older than what was waited for.
    CACHE: tl.constexpr = ".cg" if SHARED else ""
    if LOOP:
        count = tl.load(count_ptr, cache_modifier=CACHE)
        while item < count:
            taken = tl.atomic_add(taken_ptr + kv_head, 1, sem="relaxed")
            if taken == count - 1:
                tl.store(taken_ptr + kv_head, 0)  # ready for the next layer
            record = load_item(items_ptr, item, FIELDS, CACHE)
            attend_item(
                item, record, kv_head,
                q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, partial_ptr, lse_ptr, arrived_ptr, scales_ptr, table_stride,
                Q_TOKEN_STRIDE, Q_HEAD_STRIDE, KV_BLOCK_STRIDE, KV_TOKEN_STRIDE, KV_HEAD_STRIDE, SCALE_LOG2,
                NUM_KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, PRECISION, NUM_STAGES,
                MERGE_GROUP, MERGE_ROWS, WINDOW, SHARED, PDL, NATIVE, SOFTCAP, CACHE,
            )  # fmt: skip
            item = tl.num_programs(1) + taken
    else:
        record = load_item(items_ptr, item, FIELDS, CACHE)  # before it is known whether there is such an item
        if item >= tl.load(count_ptr, cache_modifier=CACHE):
            return
        attend_item(
            item, record, kv_head,
            q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, partial_ptr, lse_ptr, arrived_ptr, scales_ptr, table_stride,
            Q_TOKEN_STRIDE, Q_HEAD_STRIDE, KV_BLOCK_STRIDE, KV_TOKEN_STRIDE, KV_HEAD_STRIDE, SCALE_LOG2,
            NUM_KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, PRECISION, NUM_STAGES,
            MERGE_GROUP, MERGE_ROWS, WINDOW, SHARED, PDL, NATIVE, SOFTCAP, CACHE,
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
    loop: bool = False,
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
    loop: launch one wave of programs, which goes through the work items: for batches in which many may be none
    config: `tile_config`'s, for tuning
    Returns [batch, num_q_heads, head_dim], contiguous, of q's dtype; zeros for a sequence of context length 0, or
    nothing, if the plan is sparse.
    """
    batch, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    block_stride, token_stride, head_stride, _ = k_cache.stride()
    group = num_q_heads // num_kv_heads
    fp8 = kv_scales is not None
    block_n, num_warps, num_stages = config or tile_config(head_dim, q.element_size(), block_size, shared, fp8)
    padded_group, padded_dim = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    items = plan.max_items(batch, shared)
    if out is None:
        out = torch.empty((batch, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    _decode_kernel[(num_kv_heads, min(plan.loop_wave, items) if loop else items)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        plan.items,
        plan.count,
        plan.taken,
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
        LOOP=loop,
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
