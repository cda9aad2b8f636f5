"""Linear layers in float8 on a GPU: activations are quantised by a kernel of ours, products are torch's scaled GEMM.

Up to 16 rows, where the weights' bytes are all the time there is, the products are a kernel like `small_gemm`'s.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.reference import FP8, FP8_MAX

SMALL_ROWS = 16
MAX_SMALL_COLUMNS = 16384  # beyond them torch's tiles fill the GPU too


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scales_ptr, input_scale_ptr,
    K: tl.constexpr, BLOCK: tl.constexpr, MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row; divisions as IEEE has them, so that every way to the products has the same bytes."""
    if PDL:  # what the launch before this one wrote is read, and anything is written, only after the wait
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    if input_scale_ptr is None:
        largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-12)
        scale = largest * (1 / MAX)
        factor = tl.div_rn(1.0, largest) * MAX
    else:
        scale = tl.load(input_scale_ptr)
        factor = tl.div_rn(1.0, scale)
    tl.store(scales_ptr + row, scale)
    quantized = tl.clamp(x * factor, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out_ptr + row * K + columns, quantized.to(tl.float8e4nv), mask=columns < K)


def quantize_rows(
    x: torch.Tensor, input_scale: torch.Tensor | None = None, num_warps: int | None = None, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8_reference.quantize_rows` of a contiguous x [rows, columns], columns up to 65536.

    `num_warps` is for tuning; `pdl` lets the launch overlap the end of the one before.
    """
    rows, k = x.shape
    out = torch.empty((rows, k), dtype=FP8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    _quantize_kernel[(rows,)](
        x,
        out,
        scales,
        input_scale,
        K=k,
        BLOCK=block,
        MAX=FP8_MAX,
        PDL=pdl,
        num_warps=num_warps or min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )
    return out, scales


@triton.jit
def _prefetch(rows, K: tl.constexpr, LINES: tl.constexpr):
    """Ask for the cache lines of rows (pointers [BLOCK_N]) to arrive in L2."""
    elements = tl.minimum(tl.arange(0, LINES) * 128, K - 1)  # bytes of a line
    addresses = (rows[:, None] + elements[None, :]).to(tl.int64)
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [addresses], tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["rows"])
def _small_kernel(
    x_ptr, row_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, rows,
    N: tl.constexpr, K: tl.constexpr, ROWS_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A batched dot: K is cut into PARTS that lie in the batch dimension, one a warp, and are added at the end."""
    PART: tl.constexpr = (K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K) * BLOCK_K
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    row = tl.arange(0, ROWS_PAD)
    row_mask = row < rows
    ks = (tl.arange(0, PARTS) * PART)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    weight_rows = weight_ptr + tl.minimum(columns, N - 1).to(tl.int64) * K
    weights = weight_rows[None, :, None] + ks[:, None, :]
    xs = x_ptr + row[None, None, :] * K + ks[:, :, None]
    acc = tl.zeros([PARTS, BLOCK_N, ROWS_PAD], tl.float32)
    scales = tl.load(scales_ptr + columns, mask=column_mask, other=0.0)
    if PDL:  # weights do not change: fetching them may overtake the launch that makes x
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch(weight_rows, K, LINES)
        tl.extra.cuda.gdc_wait()
    for start in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        inside = start + ks < K
        w = tl.load(weights + start, mask=column_mask[None, :, None] & inside[:, None, :], other=0.0)
        x = tl.load(xs + start, mask=row_mask[None, None, :] & inside[:, :, None], other=0.0)
        acc = tl.dot(w.to(tl.float16), x.to(tl.float16), acc)
    row_scales = tl.load(row_scales_ptr + row, mask=row_mask, other=0.0)
    total = tl.sum(acc, 0) * row_scales[None, :] * scales[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + row[None, :] * N + columns[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=column_mask[:, None] & row_mask[None, :])


def small_products(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    config: tuple[int, int, int, int] | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """[rows, out] of `dtype` from 1 to 16 quantised rows.

    x: [rows, in] float8; row_scales: [rows]; weight: [out, in] float8; scales: [out]; bias: [out]; all contiguous
    config: (columns, K tile of a part, parts = warps, pipeline stages) of a program, for tuning
    """
    rows, k = x.shape
    n = weight.shape[0]
    block_n, block_k, parts, stages = config or (16, 128, 4, 4)
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    _small_kernel[(-(-n // block_n),)](
        x,
        row_scales,
        weight,
        scales,
        bias,
        out,
        rows,
        N=n,
        K=k,
        ROWS_PAD=16,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PARTS=parts,
        LINES=triton.next_power_of_2(-(-k // 128)),
        STAGES=stages,
        PDL=pdl,
        num_warps=parts,
        launch_pdl=pdl,
    )
    return out


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`fp8_reference.fp8_linear`, of a bfloat16 x beyond 16 rows; `in` and `out` are multiples of 16."""
    quantized, row_scales = quantize_rows(x, input_scale, pdl=pdl)
    if x.shape[0] <= SMALL_ROWS and weight.shape[0] <= MAX_SMALL_COLUMNS:
        return small_products(quantized, row_scales, weight, scales, bias, x.dtype, pdl=pdl)
    return torch._scaled_mm(
        quantized,
        weight.t(),
        scale_a=row_scales[:, None],
        scale_b=scales[None, :],
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
