"""x @ weight.T for the few rows of a small decode batch, where the weights' bytes are all the time there is.

Each program owns some output columns and their whole K, cut over its warps: no partial sums leave the program, so no
atomics and no second launch, and the result is the same every time.
"""

import torch
import triton
import triton.language as tl

MAX_COLUMNS = 16384  # beyond them larger tiles are better
MAX_GEMV_ROWS = 4  # more rows are cheaper on the tensor cores


@triton.jit
def _prefetch(rows, K: tl.constexpr, START: tl.constexpr, LINES: tl.constexpr):
    """Ask for the cache lines of rows (pointers [BLOCK_N]) from element START on, at most LINES, to arrive in L2."""
    elements = tl.minimum(START + tl.arange(0, LINES) * 64, K - 1)  # 64 two-byte elements a line
    addresses = (rows[:, None] + elements[None, :]).to(tl.int64)
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [addresses], tl.int32, is_pure=False, pack=1)


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Products and sums in float32 registers; a weight is loaded once for all rows."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    ks = tl.arange(0, BLOCK_K)
    row = tl.arange(0, ROWS_PAD)
    acc = tl.zeros([ROWS_PAD, BLOCK_N], tl.float32)
    weight_rows = weight_ptr + tl.minimum(columns, N - 1).to(tl.int64) * K
    weights = weight_rows[:, None] + ks[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    for start in tl.static_range(0, K, BLOCK_K):
        inside = start + ks < K
        w = tl.load(weights + start, mask=column_mask[:, None] & inside[None, :], other=0.0)
        if PDL and start == 0:  # weights do not change: their loads may overtake the launch that makes x
            if K > BLOCK_K:
                _prefetch(weight_rows, K, BLOCK_K, LINES)
            tl.extra.cuda.gdc_wait()
        w = w.to(tl.float32)
        for i in tl.static_range(ROWS):
            x = tl.load(x_ptr + i * K + start + ks, mask=inside, other=0.0).to(tl.float32)
            total = tl.sum(w * x[None, :], 1)
            acc += tl.where((row == i)[:, None], total[None, :], 0.0)
    if BIAS:
        acc += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + row[:, None] * N + columns[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(row < ROWS)[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["rows"])
def _dot_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
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
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch(weight_rows, K, 0, LINES)
        tl.extra.cuda.gdc_wait()
    for start in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        inside = start + ks < K
        w = tl.load(weights + start, mask=column_mask[None, :, None] & inside[:, None, :], other=0.0)
        x = tl.load(xs + start, mask=row_mask[None, None, :] & inside[:, :, None], other=0.0)
        acc = tl.dot(w, x, acc)
    total = tl.sum(acc, 0)
    if BIAS:
        total += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + row[None, :] * N + columns[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=column_mask[:, None] & row_mask[None, :])


def gemv_config(n: int, k: int) -> tuple[int, int, int]:
    """(columns, K tile, warps) of a program, as measured on an H200."""
    return 2, min(triton.next_power_of_2(k), 1024), 1


def dot_config(n: int, k: int) -> tuple[int, int, int, int]:
    """(columns, K tile of a part, parts = warps, pipeline stages) of a program, as measured on an H200."""
    return (16, 128, 4, 3) if n <= MAX_COLUMNS else (32, 64, 4, 4)


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gemv: bool | None = None,
    config: tuple[int, ...] | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.linear` for 1 to 16 rows.

    x: [rows, in] contiguous, bfloat16 or float16; weight: [out, in] contiguous; bias: [out]
    gemv, config: override the choice of the kernel and of its tiles, for tuning
    pdl: programmatic dependent launch: load weights while the launch before this one, that makes x, still runs
    Returns [rows, out]; sums are float32, the bias added before the one rounding.
    """
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if gemv if gemv is not None else rows <= MAX_GEMV_ROWS:
        block_n, block_k, num_warps = config or gemv_config(n, k)
        _gemv_kernel[(-(-n // block_n),)](
            x,
            weight,
            bias,
            out,
            N=n,
            K=k,
            ROWS=rows,
            ROWS_PAD=triton.next_power_of_2(rows),
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            LINES=triton.next_power_of_2(-(-k // 64)),
            BIAS=bias is not None,
            PDL=pdl,
            num_warps=num_warps,
            launch_pdl=pdl,
        )
    else:
        block_n, block_k, parts, stages = config or dot_config(n, k)
        _dot_kernel[(-(-n // block_n),)](
            x,
            weight,
            bias,
            out,
            rows,
            N=n,
            K=k,
            ROWS_PAD=16,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            PARTS=parts,
            LINES=triton.next_power_of_2(-(-k // 64)),
            BIAS=bias is not None,
            STAGES=stages,
            PDL=pdl,
            num_warps=parts,
            launch_pdl=pdl,
        )
    return out
