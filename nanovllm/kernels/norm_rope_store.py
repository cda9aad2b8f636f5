"""From a fused projection to attention's inputs: per-head norm, rotary embedding and the KV write, in one launch."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.fp8_kv import store_kv


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _norm_rope_store_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_cache_ptr,
    v_cache_ptr,
    scales_ptr,
    eps,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one token and up to BLOCK_H heads of one kind, as halves [BLOCK_H, BLOCK_HALF]."""
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_BLOCKS: tl.constexpr = (NUM_Q_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    is_q = part < Q_BLOCKS
    is_v = part >= Q_BLOCKS + KV_BLOCKS
    count = tl.where(is_q, NUM_Q_HEADS, NUM_KV_HEADS)
    skipped = tl.where(is_q, 0, tl.where(is_v, NUM_Q_HEADS + NUM_KV_HEADS, NUM_Q_HEADS))
    first = (part - tl.where(is_q, 0, tl.where(is_v, Q_BLOCKS + KV_BLOCKS, Q_BLOCKS))) * BLOCK_H

    head = first + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_HALF)
    dim_mask = dims < HALF
    mask = (head < count)[:, None] & dim_mask[None, :]
    inner = head[:, None] * HEAD_DIM + dims[None, :]
    source = qkv_ptr + (token * (NUM_Q_HEADS + 2 * NUM_KV_HEADS) + skipped) * HEAD_DIM + inner
    if PDL:  # what the launch before this one wrote is read, and anything is written, only after the wait
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    raw_low = tl.load(source, mask=mask, other=0.0)
    raw_high = tl.load(source + HALF, mask=mask, other=0.0)
    dtype = raw_low.dtype
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    target = slot * (NUM_KV_HEADS * HEAD_DIM) + inner
    FP8: tl.constexpr = scales_ptr is not None
    kv_scale = 1.0
    if FP8:  # of keys, then of values
        scales = scales_ptr + tl.where(is_v, NUM_KV_HEADS, 0) + head
        kv_scale = tl.load(scales, mask=head < NUM_KV_HEADS, other=1.0)[:, None]
    if is_v:
        store_kv(v_cache_ptr + target, raw_low, mask, kv_scale, FP8)
        store_kv(v_cache_ptr + target + HALF, raw_high, mask, kv_scale, FP8)
    else:
        angles = cos_sin_ptr + position * HEAD_DIM + dims
        cos = tl.load(angles, mask=dim_mask, other=0.0)[None, :]
        sin = tl.load(angles + HALF, mask=dim_mask, other=0.0)[None, :]
        low = raw_low.to(tl.float32)
        high = raw_high.to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)[:, None]
            weight_ptr = k_weight_ptr
            if is_q:
                weight_ptr = q_weight_ptr
            low_weight = tl.load(weight_ptr + dims, mask=dim_mask, other=0.0).to(tl.float32)
            high_weight = tl.load(weight_ptr + HALF + dims, mask=dim_mask, other=0.0).to(tl.float32)
            low *= scale
            high *= scale
            if q_weight_ptr.dtype.element_ty != tl.float32:  # rounded before the weight too, as in the reference
                low = low.to(dtype).to(tl.float32)
                high = high.to(dtype).to(tl.float32)
            low = (low * low_weight[None, :]).to(dtype).to(tl.float32)
            high = (high * high_weight[None, :]).to(dtype).to(tl.float32)
        new_low = (low * cos - high * sin).to(dtype)
        new_high = (high * cos + low * sin).to(dtype)
        if is_q:
            tl.store(source, new_low, mask=mask)
            tl.store(source + HALF, new_high, mask=mask)
        else:
            store_kv(k_cache_ptr + target, new_low, mask, kv_scale, FP8)
            store_kv(k_cache_ptr + target + HALF, new_high, mask, kv_scale, FP8)


def norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_q_heads: int,
    kv_scales: torch.Tensor | None = None,
    block_heads: int = 8,
    num_warps: int = 4,
    pdl: bool = False,
) -> torch.Tensor:
    """`reference.norm_rope_store`; the result is a view of qkv, rotated in place.

    In place no second buffer is needed, and the lines written are those just read. `block_heads` (heads a program, a
    power of two) and `num_warps` are for tuning; `pdl` lets the launch overlap the end of the one before.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = k_cache.shape[2:]
    parts = -(-num_q_heads // block_heads) - 2 * (-num_kv_heads // block_heads)
    _norm_rope_store_kernel[(num_tokens, parts)](
        qkv,
        positions,
        slots,
        cos_sin,
        q_weight,
        k_weight,
        k_cache,
        v_cache,
        kv_scales,
        eps,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_H=block_heads,
        NORM=q_weight is not None,
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )
    return qkv.view(num_tokens, -1, head_dim)[:, :num_q_heads]
