"""The gated activation of an MLP: silu(gate) * up."""

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:  # what the launch before this one wrote is read, and anything is written, only after the wait
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < INTERMEDIATE
    gate_ptr = gate_up_ptr + token * (2 * INTERMEDIATE) + columns
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + INTERMEDIATE, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty)  # rounded, as in the reference
    out = (silu.to(tl.float32) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * INTERMEDIATE + columns, out, mask=mask)


def silu_mul(gate_up: torch.Tensor, block: int = 1024, num_warps: int = 4, pdl: bool = False) -> torch.Tensor:
    """`reference.silu_mul` of a contiguous gate_up [num_tokens, 2 * intermediate].

    `block` (columns a program) and `num_warps` are for tuning; `pdl` lets the launch overlap the end of the one before.
    """
    num_tokens, width = gate_up.shape
    intermediate = width // 2
    out = torch.empty((num_tokens, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, -(-intermediate // block))
    _silu_mul_kernel[grid](
        gate_up, out, INTERMEDIATE=intermediate, BLOCK=block, PDL=pdl, num_warps=num_warps, launch_pdl=pdl
    )
    return out
