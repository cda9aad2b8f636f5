"""Attention of one new token per sequence over a paged KV cache, for CUDA graphs.

The cache of long sequences is cut into splits that run side by side. Under a graph the grid is fixed while lengths
change from replay to replay, so the device chooses the split size: `DecodePlan.update` (once a step, for all layers)
spreads the batch's tokens over a bounded number of work items, and `paged_decode` launches that bound. The size adapts
to the work there is: nothing depends on the longest sequence the engine allows.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
ITEM_FIELDS = 8  # int32s of a work item: sequence, table row, first and end key, first item, items, first visible key
PROGRAMS_PER_CORE = 2  # of a wave, a multiprocessor: one reads too slowly, more cut splits whose merging costs more
MERGE_ELEMENTS = 2048  # of partial outputs that a merging program loads at a time
SPREAD = 2  # work items a sequence, beyond the one wave, that even out lengths


@triton.jit
def _pieces(length, split, GRAIN: tl.constexpr):
    """(size, number) of a sequence's splits: equal ones of at most `split` keys, none empty but an empty sequence's."""
    size = tl.maximum(tl.cdiv(tl.cdiv(length, tl.maximum(tl.cdiv(length, split), 1)), GRAIN), 1) * GRAIN
    return size, tl.maximum(tl.cdiv(length, size), 1)


@triton.jit
def _hidden(length, WINDOW: tl.constexpr, GRAIN: tl.constexpr):
    """Keys, a multiple of the grain, that the window of a sequence's last token leaves behind; WINDOW 0: none."""
    if WINDOW == 0:
        return 0
    else:
        return tl.maximum(length - WINDOW, 0) // GRAIN * GRAIN


@triton.jit(
    do_not_specialize=["batch", "target_items"],
    do_not_specialize_on_alignment=["rows_ptr", "context_lens_ptr"],
)
def _plan_kernel(
    items_ptr, count_ptr, rows_ptr, context_lens_ptr, batch, target_items,
    GRAIN: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program a sequence: write the sequence's work items; program 0 also their number over the batch.

    Every program reads all lengths, twice (the sum sets the split size, the size the offsets): cheaper than a second
    launch. The items number at most `batch + target_items`: each sequence's last split may be short.
    """
    seq = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.int64)
    for chunk in range(0, batch, CHUNK):
        index = chunk + lanes
        lengths = tl.load(context_lens_ptr + index, mask=index < batch, other=0)
        total += lengths - _hidden(lengths, WINDOW, GRAIN)
    split = (tl.maximum(tl.cdiv(tl.cdiv(tl.sum(total), target_items), GRAIN), 1) * GRAIN).to(tl.int32)

    before = tl.zeros([CHUNK], tl.int32)
    count = tl.zeros([CHUNK], tl.int32)
    for chunk in range(0, batch, CHUNK):
        index = chunk + lanes
        lengths = tl.load(context_lens_ptr + index, mask=index < batch, other=0)
        _, numbers = _pieces(lengths - _hidden(lengths, WINDOW, GRAIN), split, GRAIN)
        count += tl.where(index < batch, numbers, 0)
        before += tl.where(index < seq, numbers, 0)
    first = tl.sum(before)
    if seq == 0:
        tl.store(count_ptr, tl.sum(count))

    length = tl.load(context_lens_ptr + seq)
    row = tl.load(rows_ptr + seq)
    hidden = _hidden(length, WINDOW, GRAIN)
    piece, splits = _pieces(length - hidden, split, GRAIN)
    for chunk in range(0, splits, CHUNK):
        index = chunk + lanes
        mask = index < splits
        item = items_ptr + (first + index) * FIELDS
        tl.store(item, tl.zeros([CHUNK], tl.int32) + seq, mask=mask)
        tl.store(item + 1, tl.zeros([CHUNK], tl.int32) + row, mask=mask)
        tl.store(item + 2, hidden + index * piece, mask=mask)
        tl.store(item + 3, tl.minimum(hidden + (index + 1) * piece, length), mask=mask)
        tl.store(item + 4, tl.zeros([CHUNK], tl.int32) + first, mask=mask)
        tl.store(item + 5, tl.zeros([CHUNK], tl.int32) + splits, mask=mask)
        if WINDOW:
            tl.store(item + 6, tl.zeros([CHUNK], tl.int32) + tl.maximum(length - WINDOW, 0), mask=mask)


@triton.jit
def _merge(
    out, partial, lse, splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PADDED_GROUP: tl.constexpr, ROWS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one sequence and KV head by their log-sums; the pointers are at its first split and head.

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
    for chunk in tl.range(0, splits, SPLITS, num_stages=NUM_STAGES):
        split = chunk + row // PADDED_GROUP
        live = (split < splits) & (row % PADDED_GROUP < GROUP)
        slot = split * NUM_KV_HEADS * GROUP + row % PADDED_GROUP
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
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, items_ptr, count_ptr, partial_ptr, lse_ptr, arrived_ptr, table_stride,
    Q_TOKEN_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr, KV_BLOCK_STRIDE: tl.constexpr,
    KV_TOKEN_STRIDE: tl.constexpr, KV_HEAD_STRIDE: tl.constexpr, SCALE_LOG2: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    MERGE_GROUP: tl.constexpr, MERGE_ROWS: tl.constexpr, FIELDS: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one KV head, its GROUP query heads, and one work item (a split of one sequence).

    A sequence of one split is written at once. Of several, each leaves its normalised part and the log2 of its
    exponential sum in the workspace, and the last to arrive merges them: no second launch.
    """
    if PDL:  # what the launch before this one wrote is read, and anything is written, only after the wait
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    record = items_ptr + item * FIELDS
    seq = tl.load(record)
    row = tl.load(record + 1)
    start = tl.load(record + 2)
    end = tl.load(record + 3)
    first = tl.load(record + 4)
    splits = tl.load(record + 5)
    if item >= tl.load(count_ptr):
        return
    if WINDOW:  # an item's first grain holds a visible key, but its first tile need not
        visible = tl.load(record + 6)
        start = tl.maximum(start, visible // BLOCK_N * BLOCK_N)

    table = table_ptr + row.to(tl.int64) * table_stride
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    mask = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = seq.to(tl.int64) * Q_TOKEN_STRIDE + head * Q_HEAD_STRIDE
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    k_base = k_ptr + kv_head.to(tl.int64) * KV_HEAD_STRIDE
    v_base = v_ptr + kv_head.to(tl.int64) * KV_HEAD_STRIDE

    acc = tl.zeros([GROUP_PAD, BLOCK_D], tl.float32)
    row_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP_PAD], tl.float32)
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + start // BLOCK_SIZE)
    for tile_start in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
        keys = tile_start + lanes
        in_range = keys < end
        if WINDOW:
            in_range &= keys >= visible
        if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies inside one block: one table entry, contiguous rows
            offsets = block.to(tl.int64) * KV_BLOCK_STRIDE + (tile_start % BLOCK_SIZE + lanes) * KV_TOKEN_STRIDE
            # Loaded one step early: a load that K's address needs in the same step would use up the pipeline's stages.
            block = tl.load(table + tl.minimum(tile_start + BLOCK_N, end - 1) // BLOCK_SIZE)
        else:  # table columns past the last key hold anything
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=in_range, other=0)
            offsets = blocks.to(tl.int64) * KV_BLOCK_STRIDE + (keys % BLOCK_SIZE) * KV_TOKEN_STRIDE
        # Values past the end must be zero, not just weighted by zero: unused cache slots may hold NaN.
        k_mask = in_range[None, :] & (dims < HEAD_DIM)[:, None]
        v_mask = in_range[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_base + offsets[None, :] + dims[:, None], mask=k_mask, other=0.0)
        v = tl.load(v_base + offsets[:, None] + dims[None, :], mask=v_mask, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION)
        scores = tl.where(in_range[None, :], scores * SCALE_LOG2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))  # finite: a tile holds at least one key
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)

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
            partial_ptr + (first.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP * HEAD_DIM,
            lse_ptr + (first * NUM_KV_HEADS + kv_head) * GROUP,
            splits, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, MERGE_GROUP, MERGE_ROWS, NUM_STAGES,
        )  # fmt: skip


@dataclass(frozen=True)
class DecodePlan:
    """Work list and workspace of decode attention, shared by all layers and by the graphs of all batch sizes."""

    items: torch.Tensor  # [capacity, ITEM_FIELDS] int32
    count: torch.Tensor  # [1] int32, the items in use
    partial: torch.Tensor  # [capacity, num_q_heads, head_dim] float32, each split's normalised output
    lse: torch.Tensor  # [capacity, num_q_heads] float32, log2 of each split's exponential sum
    arrived: torch.Tensor  # [max_batch, num_kv_heads] int32, splits done; zero between launches
    wave: int  # work items that fill the GPU once
    grain: int = 64  # keys; split sizes are multiples of it
    window: int | None = None  # keys that a token sees, itself included; None: all

    @classmethod
    def create(
        cls, max_batch: int, num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device | str
    ) -> "DecodePlan":
        """Allocate for batches of up to `max_batch` sequences."""
        device = torch.device(device)
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        wave = -(-cores * PROGRAMS_PER_CORE // num_kv_heads)
        capacity = wave + (SPREAD + 1) * max_batch
        return cls(
            items=torch.zeros((capacity, ITEM_FIELDS), dtype=torch.int32, device=device),
            count=torch.zeros(1, dtype=torch.int32, device=device),
            partial=torch.empty((capacity, num_q_heads, head_dim), dtype=torch.float32, device=device),
            lse=torch.empty((capacity, num_q_heads), dtype=torch.float32, device=device),
            arrived=torch.zeros((max_batch, num_kv_heads), dtype=torch.int32, device=device),
            wave=wave,
        )

    def with_window(self, window: int) -> "DecodePlan":
        """For layers that see the last `window` keys only: a work list of its own in the same workspace."""
        return replace(self, items=self.items.clone(), count=self.count.clone(), window=window)

    def max_items(self, batch: int) -> int:
        """Bound on a batch's work items: one wave, SPREAD a sequence, and one that each sequence's rounding may add."""
        return self.wave + (SPREAD + 1) * batch

    def update(self, rows: torch.Tensor, context_lens: torch.Tensor) -> None:
        """Plan a batch on the device: rows of the block tables and context lengths, both [batch] int32."""
        batch = rows.shape[0]
        _plan_kernel[(batch,)](
            self.items,
            self.count,
            rows,
            context_lens,
            batch,
            self.max_items(batch) - batch,
            GRAIN=self.grain,
            CHUNK=256,
            FIELDS=ITEM_FIELDS,
            WINDOW=self.window or 0,
            num_warps=1,
        )


def tile_config(head_dim: int, itemsize: int, block_size: int) -> tuple[int, int, int]:
    """(keys, warps, pipeline stages) of a program, as measured on an H200; the keys divide a plan's grain."""
    if itemsize == 4:  # exact float32 runs on the FMA units and holds twice the bytes in shared memory
        return (32, 4, 2) if head_dim <= 128 else (16, 4, 2)
    if head_dim > 128:
        return 32, 2, 3
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
) -> torch.Tensor:
    """Attention of one new token per sequence over its context (its plan's window); `plan.update` has seen this batch.

    q: [batch, num_q_heads, head_dim], any token and head stride
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], the new tokens' keys and values included
    block_tables: [num_rows, max_blocks] int32; columns past a sequence's last block are never read
    out: where to write, contiguous; new by default
    pdl: programmatic dependent launch: overlap the end of the launch before this one
    Returns [batch, num_q_heads, head_dim], contiguous, of q's dtype; zeros for a sequence of context length 0.
    """
    batch, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    block_stride, token_stride, head_stride, _ = k_cache.stride()
    group = num_q_heads // num_kv_heads
    block_n, num_warps, num_stages = tile_config(head_dim, q.element_size(), block_size)
    padded_group, padded_dim = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    if out is None:
        out = torch.empty((batch, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    _decode_kernel[(num_kv_heads, plan.max_items(batch))](
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
        PDL=pdl,
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
        heads = q[i].to(dtype).unflatten(0, (num_kv_heads, -1))  # [num_kv_heads, group, head_dim]
        scores = heads @ k.transpose(-1, -2) * scale
        if window is not None:
            scores[..., : max(context_len - window, 0)] = float("-inf")
        weights = scores.softmax(-1)
        out[i] = (weights @ v).flatten(0, 1).to(q.dtype)
    return out
