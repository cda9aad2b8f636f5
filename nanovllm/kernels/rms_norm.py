"""RMS normalisation, alone or with the residual sum before it, one program a token."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    token = tl.program_id(0).to(tl.int64)
    offsets = token * HIDDEN + columns
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if PDL:  # what the launch before this one wrote is read, and anything is written, only after the wait
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    if PARTS > 1:
        x = x.to(tl.float32)
        for part in tl.static_range(1, PARTS):
            other = tl.load(x_ptr + (part * tl.num_programs(0) + token) * HIDDEN + columns, mask=mask, other=0.0)
            x += other.to(tl.float32)
        x = x.to(out_ptr.dtype.element_ty)  # as if it had come in one piece
    if ADD:
        residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(residual_ptr + offsets, x, mask=mask)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    normed = x * scale
    if weight_ptr.dtype.element_ty != tl.float32:  # rounded before the weight, as in the reference
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    out = (normed * weight.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, out, mask=mask)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    add: bool,
    num_warps: int | None,
    pdl: bool,
) -> torch.Tensor:
    hidden = x.shape[-1]
    block = triton.next_power_of_2(hidden)
    out = torch.empty_like(residual)
    _rms_norm_kernel[(residual.numel() // hidden,)](
        x,
        residual,
        weight,
        out,
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        ADD=add,
        PARTS=x.numel() // residual.numel(),
        PDL=pdl,
        num_warps=num_warps or min(max(block // 256, 1), 16),  # a thread holds 8 values of each row, 16 bytes
        launch_pdl=pdl,
    )
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, num_warps: int | None = None, pdl: bool = False
) -> torch.Tensor:
    """`reference.rms_norm` of a contiguous x [num_tokens, hidden], hidden up to 16384.

    `num_warps` is for tuning; `pdl` (programmatic dependent launch) lets the launch overlap the end of the one before.
    """
    return _launch(x, x, weight, eps, False, num_warps, pdl)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    num_warps: int | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.add_rms_norm` of contiguous x, residual [num_tokens, hidden]: the sum overwrites `residual`.

    x may be parts [parts, num_tokens, hidden], of `split_gemm.split_linear` or `moe.moe`: they are added up in float32
    and their sum is rounded first.
    `num_warps` and `pdl` as in `rms_norm`.
    """
    return _launch(x, residual, weight, eps, True, num_warps, pdl), residual
