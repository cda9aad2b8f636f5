"""Causal attention of new tokens over a paged KV cache: prefills, chunks of prefills and mixed batches."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.fp8_kv import scale_query
from nanovllm.kernels.reference import soft_cap_
from nanovllm.kernels.softcap import soft_cap

LOG2_E = 1.4426950408889634


@triton.jit
def add_tile(scores, v, acc, row_max, row_sum, SCALE_LOG2: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax: scores [rows, keys] and values [keys, dims] into the running output.

    A row's maximum is of raw scores, so that scale and maximum are one multiply-add, and finite from the first tile on.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    rescale = tl.exp2((row_max - new_max) * SCALE_LOG2)
    weights = tl.exp2(scores * SCALE_LOG2 - (new_max * SCALE_LOG2)[:, None])
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "cu_seqlens_ptr", "context_lens_ptr"],
)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_tiles, v_tiles, out_ptr, table_ptr, rows_ptr, cu_seqlens_ptr, context_lens_ptr,
    scales_ptr, num_seqs, table_stride,
    Q_TOKEN_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr, KV_BLOCK_STRIDE: tl.constexpr,
    KV_TOKEN_STRIDE: tl.constexpr, KV_HEAD_STRIDE: tl.constexpr, SCALE_LOG2: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr, SEARCH: tl.constexpr,
    WINDOW: tl.constexpr, TMA: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One program: one KV head and BLOCK_M query rows of one sequence.

    A row is a (token, head of the group) pair, token-major, so that all query heads of a KV head share its loads and
    no group size wastes rows. The tiles of all sequences are numbered through: sequence i begins at tile
    `cu_seqlens[i] * GROUP // BLOCK_M + i`, which leaves it at least the tiles it needs; a surplus one exits,
    as do those of a sequence of context length 0, whose tokens are left out.
    Programs run from the last tile to the first: within a sequence that is the longest first, so the tail is short.
    With TMA, `k_tiles` and `v_tiles` are descriptors of the cache as [slots, KV heads and dims]: tiles of keys that
    every row sees come through the copy engine, which needs no registers; the last ones by pointers, as all do without.
    `scales_ptr`: of a cache in float8, see `fp8_kv`. SOFTCAP: None, or the cap; capped scores are scaled already.
    """
    SCORE_LOG2: tl.constexpr = 1.0 if SOFTCAP is not None else SCALE_LOG2
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)

    seq = -1
    for chunk in range(0, num_seqs, SEARCH):
        index = chunk + tl.arange(0, SEARCH)
        begin = tl.load(cu_seqlens_ptr + index, mask=index < num_seqs, other=0) * GROUP // BLOCK_M + index
        seq += tl.sum(((index < num_seqs) & (begin <= tile)).to(tl.int32))
    first_token = tl.load(cu_seqlens_ptr + seq)
    q_len = tl.load(cu_seqlens_ptr + seq + 1) - first_token
    context_len = tl.load(context_lens_ptr + seq)
    table = table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
    first_row = (tile - (first_token * GROUP // BLOCK_M + seq)) * BLOCK_M
    if (first_row >= q_len * GROUP) | (context_len == 0):
        return

    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    mask = (token < q_len)[:, None] & (dims < HEAD_DIM)[None, :]
    global_token = (first_token + token).to(tl.int64)
    q_offsets = global_token * Q_TOKEN_STRIDE + head * Q_HEAD_STRIDE
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    if scales_ptr is not None:
        q = scale_query(q, tl.load(scales_ptr + kv_head))
    k_base = k_ptr + kv_head.to(tl.int64) * KV_HEAD_STRIDE
    v_base = v_ptr + kv_head.to(tl.int64) * KV_HEAD_STRIDE

    cached = context_len - q_len
    position = cached + token
    end = tl.minimum(context_len, cached + (first_row + BLOCK_M - 1) // GROUP + 1)
    masked_from = (cached + first_row // GROUP + 1) // BLOCK_N * BLOCK_N  # before it, every row sees every key
    begin = 0
    if WINDOW:  # from the first tile that the first row sees; a later row may see nothing of it, so no maximum is -inf
        begin = tl.maximum(cached + first_row // GROUP + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    LOWEST: tl.constexpr = -1e30 if WINDOW else float("-inf")  # without one, every row sees key 0, in the first tile
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if TMA:
        block = tl.load(table + begin // BLOCK_SIZE)
        for start in tl.range(begin, masked_from, BLOCK_N, num_stages=NUM_STAGES):
            slot = block * BLOCK_SIZE + start % BLOCK_SIZE
            block = tl.load(table + tl.minimum(start + BLOCK_N, end - 1) // BLOCK_SIZE)
            k = k_tiles.load([slot, kv_head * HEAD_DIM])
            v = v_tiles.load([slot, kv_head * HEAD_DIM])
            if scales_ptr is not None:
                k = k.to(q.dtype)
                v = v.to(q.dtype)
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            if SOFTCAP is not None:
                scores = soft_cap(scores, SCALE_LOG2, SOFTCAP)
            if WINDOW:  # noqa: SIM102 - known when compiling
                if start < end - WINDOW:
                    scores = tl.where((start + lanes)[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
            acc, row_max, row_sum = add_tile(scores, v, acc, row_max, row_sum, SCORE_LOG2, PRECISION)
        begin = tl.maximum(begin, masked_from)
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + begin // BLOCK_SIZE)
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        # Lanes past the end read the last key again: unused slots may hold NaN, unused table columns anything.
        lane = tl.minimum(lanes, end - 1 - start)
        if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies inside one block: one table entry, contiguous rows
            offsets = block.to(tl.int64) * KV_BLOCK_STRIDE + (start % BLOCK_SIZE + lane) * KV_TOKEN_STRIDE
            # Loaded one step early: a load that K's address needs in the same step would use up the pipeline's stages.
            block = tl.load(table + tl.minimum(start + BLOCK_N, end - 1) // BLOCK_SIZE)
        else:
            blocks = tl.load(table + (start + lane) // BLOCK_SIZE).to(tl.int64)
            offsets = blocks * KV_BLOCK_STRIDE + (start + lane) % BLOCK_SIZE * KV_TOKEN_STRIDE
        k_ptrs = k_base + offsets[None, :] + dims[:, None]
        v_ptrs = v_base + offsets[:, None] + dims[None, :]
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        else:
            k = tl.load(k_ptrs, mask=(dims < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        if scales_ptr is not None:
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        scores = tl.dot(q, k, input_precision=PRECISION)
        if SOFTCAP is not None:
            scores = soft_cap(scores, SCALE_LOG2, SOFTCAP)
        if start >= masked_from:
            scores = tl.where((start + lanes)[None, :] <= position[:, None], scores, float("-inf"))
        if WINDOW:  # noqa: SIM102 - known when compiling
            if start < end - WINDOW:  # the last row, at end - 1, does not see all of the tile
                scores = tl.where((start + lanes)[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
        acc, row_max, row_sum = add_tile(scores, v, acc, row_max, row_sum, SCORE_LOG2, PRECISION)

    out = acc / row_sum[:, None]
    if scales_ptr is not None:
        out *= tl.load(scales_ptr + NUM_KV_HEADS + kv_head)
    out_offsets = (global_token * NUM_KV_HEADS * GROUP + head) * HEAD_DIM
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def tile_config(head_dim: int, itemsize: int, block_size: int, hopper: bool, tma: bool) -> tuple[int, int, int, int]:
    """(query rows, keys, warps, pipeline stages) of a program, as measured on an H200; older cards hold less."""
    if tma:
        return (64, 64, 4, 3) if head_dim <= 128 else (128, 64, 8, 2)
    if itemsize == 4:  # exact float32 runs on the FMA units and holds twice the bytes in shared memory
        return (32, 32, 4, 1) if head_dim <= 128 else (16, 16, 4, 1)
    if head_dim <= 64:
        return 128, 64, 8, 3
    if head_dim <= 128:
        if not hopper:
            return 128, 64, 8, 2
        return 128, 64, 8, 3 if block_size % 64 == 0 else 5  # a gather's table loads take every other stage
    return (128, 64, 8, 2) if hopper else (64, 32, 8, 2)


def can_use_tma(cache: torch.Tensor) -> bool:
    """Whether tiles of keys lie in one block each, and rows as the copy engine wants them."""
    _, block_size, _, head_dim = cache.shape
    return (
        cache.element_size() == 2
        and cache.is_contiguous()
        and block_size % 64 == 0
        and head_dim >= 64
        and head_dim == triton.next_power_of_2(head_dim)
    )


def cache_tiles(cache: torch.Tensor, keys: int) -> TensorDescriptor:
    """Descriptor of a cache as [slots, KV heads and dims], for tiles of `keys` keys of one KV head."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    return TensorDescriptor.from_tensor(cache.view(num_blocks * block_size, num_kv_heads * head_dim), [keys, head_dim])


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    softcap: float | None = None,
    tma: bool | None = None,
    config: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """Attention of the new tokens of several sequences, each over its whole context, causal.

    q: [num_tokens, num_q_heads, head_dim], any token and head stride
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], the new tokens' keys and values included
    block_tables: [num_rows, max_blocks] int32; columns past a sequence's last block are never read
    rows: [num_seqs] int32, each sequence's row of block_tables
    cu_seqlens_q: [num_seqs + 1] int32, each sequence's first token in q, then num_tokens
    context_lens: [num_seqs] int32, cached and new tokens; new token j stands at context_len - q_len + j;
        0: nothing is written for this sequence's tokens
    out: where to write, contiguous; new by default
    window: keys that a token sees, itself included; None: all before it
    kv_scales: [2, num_kv_heads] float32, of a cache in float8: of keys, then of values
    softcap: soft cap of the scores (`softcap.soft_cap`); None: none
    tma: fetch keys and values through the copy engine; by default wherever it can (`can_use_tma`)
    config: `tile_config`'s, for tuning
    Returns [num_tokens, num_q_heads, head_dim], contiguous, of q's dtype.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    block_stride, token_stride, head_stride, _ = k_cache.stride()
    num_seqs = rows.shape[0]
    group = num_q_heads // num_kv_heads
    hopper = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (9, 0)
    if tma is None:
        tma = hopper and can_use_tma(k_cache)
    block_m, block_n, num_warps, num_stages = config or tile_config(head_dim, q.element_size(), block_size, hopper, tma)
    if out is None:
        out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    _prefill_kernel[(num_tokens * group // block_m + num_seqs, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        cache_tiles(k_cache, block_n) if tma else k_cache,
        cache_tiles(v_cache, block_n) if tma else v_cache,
        out,
        block_tables,
        rows,
        cu_seqlens_q,
        context_lens,
        kv_scales,
        num_seqs,
        block_tables.stride(0),
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
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_SIZE=block_size,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        NUM_STAGES=num_stages,
        SEARCH=256,
        WINDOW=window or 0,
        TMA=tma,
        SOFTCAP=softcap,
        num_warps=num_warps,
    )
    return out


def paged_prefill_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """`paged_prefill` in plain torch, float32 (or float64, where q is that) inside, one sequence at a time."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = cu_seqlens_q.tolist()
    for i, (row, context_len) in enumerate(zip(rows.tolist(), context_lens.tolist(), strict=True)):
        start, stop = starts[i], starts[i + 1]
        blocks = block_tables[row, : -(-context_len // block_size)].long()
        k, v = (c[blocks].flatten(0, 1)[:context_len].to(dtype).transpose(0, 1) for c in (k_cache, v_cache))
        if kv_scales is not None:
            k, v = k * kv_scales[0, :, None, None], v * kv_scales[1, :, None, None]
        heads = q[start:stop].to(dtype).transpose(0, 1).unflatten(0, (num_kv_heads, -1))
        scores = heads @ k.unsqueeze(1).transpose(-1, -2) * scale  # [num_kv_heads, group, q_len, context_len]
        if softcap is not None:
            soft_cap_(scores, softcap)
        position = torch.arange(context_len - (stop - start), context_len, device=q.device)
        keys = torch.arange(context_len, device=q.device)
        hidden = keys > position[:, None]
        if window is not None:
            hidden |= keys <= position[:, None] - window
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        out[start:stop] = (weights @ v.unsqueeze(1)).flatten(0, 1).transpose(0, 1).to(q.dtype)
    return out
