"""`split_gemm` for weights and inputs in float8: parts over K for whoever adds them up, the scales already in them."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.fp8_linear import quantize_rows
from nanovllm.kernels.split_gemm import split_config

BLOCK_N = 64
BLOCK_K = 128


@triton.jit
def _prefetch(rows, start, END: tl.constexpr, LINES: tl.constexpr):
    """Ask for LINES cache lines of each of some rows (pointers [BLOCK_N]) from element `start`, to arrive in L2."""
    elements = tl.minimum(start + tl.arange(0, LINES) * 128, END - 1)  # bytes of a line
    addresses = (rows[:, None] + elements[None, :]).to(tl.int64)
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [addresses], tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["rows"])
def _split_kernel(
    x_desc, weight_desc, weight_ptr, row_scales_ptr, scales_ptr, out_ptr, rows,
    N: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns and BLOCK_M rows of one part of K. Elements beyond a matrix arrive as zeros."""
    first_column = tl.program_id(0) * BLOCK_N
    first_row = tl.program_id(1) * BLOCK_M
    part = tl.program_id(2)
    columns = first_column + tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_M)
    if PDL:  # weights do not change: fetching them may overtake the launch that makes x
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch(weight_ptr + tl.minimum(columns, N - 1).to(tl.int64) * K, part * PART, K, LINES)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(part * PART, tl.minimum((part + 1) * PART, K), BLOCK_K, num_stages=STAGES):
        w = weight_desc.load([first_column, k])
        x = x_desc.load([first_row, k])
        acc = tl.dot(w, x.T, acc)
    acc *= tl.load(row_scales_ptr + row, mask=row < rows, other=0.0)[None, :]
    acc *= tl.load(scales_ptr + columns, mask=columns < N, other=0.0)[:, None]
    out = out_ptr + (part * rows + row)[None, :].to(tl.int64) * N + columns[:, None]
    tl.store(out, acc, mask=(row < rows)[None, :] & (columns < N)[:, None])


def fp8_split_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    config: tuple[int, int, int] | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`fp8_reference.fp8_linear` without a bias, as parts [parts, rows, out] float32 that are to be added up.

    x: [rows, in] contiguous, `in` a multiple of 16; weight: [out, in] float8; scales: [out]
    config: `split_gemm.split_config`'s, for tuning
    pdl: programmatic dependent launch: overlap the end of the launch before this one
    """
    values, row_scales = quantize_rows(x, input_scale, pdl=pdl)
    rows, k = x.shape
    n = weight.shape[0]
    block_m, parts, stages = config or split_config(rows)
    part = -(-k // (parts * BLOCK_K)) * BLOCK_K
    parts = -(-k // part)
    out = torch.empty((parts, rows, n), dtype=torch.float32, device=x.device)
    _split_kernel[(-(-n // BLOCK_N), -(-rows // block_m), parts)](
        TensorDescriptor.from_tensor(values, [block_m, BLOCK_K]),
        TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K]),
        weight,
        row_scales,
        scales,
        out,
        rows,
        N=n,
        K=k,
        PART=part,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        STAGES=stages,
        LINES=triton.next_power_of_2(-(-part // 128)),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
