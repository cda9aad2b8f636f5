"""A layer of experts as two grouped GEMMs over tokens sorted by expert (see `moe_routing`).

Up to a few thousand tokens the bytes of the chosen experts' weights are all the time there is. So the weights are the
dots' first operand, whose tiles have 64 rows in hardware, and the tokens of one expert the second, of which a tile need
have no more than 16: a tile reads each weight once, at any batch size. Programs that work on the same weights are
neighbours, so that an expert with several tiles is read from memory once. The first GEMM ends in silu(gate) * up, the
second in the router's weight; what is left, the sum over a token's experts, is up to the norm that comes next
(`rms_norm.add_rms_norm` adds parts up). Nothing is added atomically: the result is the same every time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.moe_routing import Routing, route


class Tile(NamedTuple):
    """What a program of a GEMM works on."""

    columns: int  # rows of a weight matrix, of gate and up each
    inner: int
    warps: int
    stages: int


class MoEConfig(NamedTuple):
    block_m: int  # pairs in a tile
    gate_up: Tile
    down: Tile


@triton.jit(do_not_specialize=["num_tokens"])
def _expert_gemm_kernel(
    x_ptr, weight_desc, out_ptr, pairs_ptr, tiles_ptr, scales_ptr, num_tokens,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N output columns of one tile of pairs.

    GATED: x is by token, out by pair. Otherwise x is by pair, and out by slot and then token. Elements of the weights
    beyond an expert's are the next one's, or zeros beyond the last: their columns are not stored.
    """
    if PDL:  # which weights are wanted is what the launch before this one finds out
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tiles_ptr + tl.program_id(0) // column_blocks * 3
    count = tl.load(tile + 2)
    if count == 0:
        return
    expert = tl.load(tile)
    first = tl.load(tile + 1)
    first_column = tl.program_id(0) % column_blocks * BLOCK_N
    row = tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    pair = tl.load(pairs_ptr + first + row, mask=row < count, other=0)
    xs = x_ptr + (pair // TOP_K if GATED else pair).to(tl.int64)[None, :] * K + ks[:, None]
    weight_row = expert * (2 * N if GATED else N) + first_column
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(xs + k, mask=(row < count)[None, :], other=0.0)
        else:
            x = tl.load(xs + k, mask=(row < count)[None, :] & (k + ks < K)[:, None], other=0.0)
        acc = tl.dot(weight_desc.load([weight_row, k]), x, acc, input_precision="ieee")
        if GATED:
            up = tl.dot(weight_desc.load([weight_row + N, k]), x, up, input_precision="ieee")
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
        out_row = pair
    else:
        acc *= tl.load(scales_ptr + pair, mask=row < count, other=0.0)[None, :]
        out_row = pair % TOP_K * num_tokens + pair // TOP_K
    column = first_column + tl.arange(0, BLOCK_N)
    out = out_ptr + out_row.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(row < count)[None, :] & (column < N)[:, None])


def moe_config(num_pairs: int, num_experts: int, dtype: torch.dtype) -> MoEConfig:
    """Tiles by the pairs that an expert gets on average, as measured on an H200 with Qwen3-30B-A3B's shapes."""
    if dtype == torch.float32:
        return MoEConfig(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
    mean = num_pairs / num_experts
    if mean <= 10:
        return MoEConfig(16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3))
    if mean <= 20:
        return MoEConfig(32, Tile(64, 64, 4, 5), Tile(64, 128, 4, 3))
    if mean <= 48:
        return MoEConfig(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4))
    return MoEConfig(128, Tile(128, 64, 8, 4), Tile(256, 64, 8, 3))


def _expert_gemm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, routing: Routing, top_k: int, gated: bool,
    block_m: int, tile: Tile, pdl: bool,
) -> None:  # fmt: skip
    n, k = out.shape[-1], x.shape[-1]
    _expert_gemm_kernel[(len(routing.tiles) * -(-n // tile.columns),)](
        x,
        TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.columns, tile.inner]),
        out,
        routing.pairs,
        routing.tiles,
        routing.weights,
        out.shape[-2],
        N=n,
        K=k,
        TOP_K=top_k,
        GATED=gated,
        BLOCK_M=block_m,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )


def moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    normalize: bool,
    config: MoEConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`moe_reference.moe`, but for the sum over a token's experts.

    All tensors contiguous; a row of `gate_up` and of `down` has a multiple of 16 bytes; at most 1024 experts
    config: `moe_config`'s, for tuning
    pdl: programmatic dependent launch: let the launches overlap the end of the ones before
    Returns parts [top_k, num_tokens, hidden] in x's dtype, weighted.
    """
    num_tokens, hidden = x.shape
    num_pairs, intermediate = num_tokens * top_k, down.shape[2]
    config = config or moe_config(num_pairs, len(down), x.dtype)
    routing = route(logits, top_k, normalize, config.block_m, pdl)
    inner = torch.empty((num_pairs, intermediate), dtype=x.dtype, device=x.device)
    parts = torch.empty((top_k, num_tokens, hidden), dtype=x.dtype, device=x.device)
    _expert_gemm(x, gate_up, inner, routing, top_k, True, config.block_m, config.gate_up, pdl)
    _expert_gemm(inner, down, parts, routing, top_k, False, config.block_m, config.down, pdl)
    return parts
