"""One pass over the logits to one token a row: Gumbel-max, with noise that depends on (seed, position, id) alone.

The noise is `reference.gumbel_noise`, computed where it is used: nothing of vocabulary size is written.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.filters import filter_bounds
from nanovllm.layers.sampler import Filters
from nanovllm.sampling_params import GREEDY_BELOW

TARGET_PROGRAMS = 1056  # 8 on each of an H200's 132 multiprocessors: enough loads in flight
LOG2_E = 1.4426950408889634


@triton.jit
def _mix(x):
    """A bijection of uint32 that scatters every input bit (lowbias32, C. Wellons, 2018)."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:  # one instruction, absolute error 2^-22; `tl.log2` takes twenty
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def _noise(a, b, ids, FAST: tl.constexpr):
    """Gumbel noise over ln 2, plus a constant: -log2(E) with E = -log2(1 - v), v in (0, 1) a hash of (a, b, ids)."""
    h = _mix(_mix(ids.to(tl.uint32) ^ a) + b)
    v = h.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # (h + 0.5) * 2^-32, rounded once
    v = tl.minimum(v, 0.99999994)  # 1 - 2^-24
    # 1 - v would lose a small v, where the large noises are: there, terms of the series of log(1 - v).
    series = v * (1.4426950408889634 + v * (0.7213475204444817 + v * 0.48089834696298783))
    return -_log2(tl.where(v < 0.00390625, series, -_log2(1.0 - v, FAST)), FAST)


@triton.jit(do_not_specialize=["tiles"])
def _sample_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    floors_ptr,
    last_ids_ptr,
    scores_ptr,
    ids_ptr,
    row_stride,
    tiles,
    FILTERED: tl.constexpr,
    VOCAB: tl.constexpr,
    FIRST_ID: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_TEMP: tl.constexpr,
    SCALE: tl.constexpr,
    FAST: tl.constexpr,
):
    """One program: the best score, in units of ln 2, and its id among `tiles` tiles of BLOCK columns of a row.

    Column i of VOCAB is the token id FIRST_ID + i.
    FILTERED: only of logits above the row's floor, and of ids up to the last one of those that equal it.
    """
    split = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    greedy = temperature < MIN_TEMP
    scale = tl.where(greedy, 1.0, SCALE / tl.where(greedy, 1.0, temperature))
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.uint32)
    stirred = _mix(position * tl.full([], 0x9E3779B9, tl.uint32) + tl.full([], 1, tl.uint32))
    a = _mix(seed.to(tl.uint32) ^ stirred)
    b = _mix((seed >> 32).to(tl.uint32) ^ a ^ tl.full([], 0x85EBCA6B, tl.uint32))

    if FILTERED:
        floor = tl.load(floors_ptr + row)
        last_id = tl.load(last_ids_ptr + row)
    ids = split * tiles * BLOCK + tl.arange(0, BLOCK)
    base = logits_ptr + row.to(tl.int64) * row_stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = ids  # in range in the lane that wins when nothing is above -inf: the lowest
    for _ in range(0, tiles):
        logits = tl.load(base + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        score = logits * scale
        if temperature >= MIN_TEMP:
            score += _noise(a, b, ids + FIRST_ID, FAST)
        if FILTERED:
            stays = (logits > floor) | ((logits == floor) & (ids <= last_id))
            score = tl.where(stays, score, float("-inf"))
        better = score > best  # false for NaN
        best = tl.where(better, score, best)
        best_ids = tl.where(better, ids, best_ids)
        ids += BLOCK
    top = tl.max(best, 0)
    winner = tl.min(tl.where(best == top, best_ids, VOCAB), 0)
    tl.store(scores_ptr + row * tl.num_programs(0) + split, top)
    tl.store(ids_ptr + row * tl.num_programs(0) + split, winner + FIRST_ID)


@triton.jit(do_not_specialize=["splits"])
def _pick_kernel(scores_ptr, ids_ptr, out_ptr, best_ptr, splits, BLOCK: tl.constexpr, WITH_SCORE: tl.constexpr):
    """One program: the best of a row's splits; they are in order of ids, so the first of equals has the lowest."""
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    best = tl.full([], float("-inf"), tl.float32)
    winner = tl.full([], 2147483647, tl.int32)
    for first in range(0, splits, BLOCK):
        inside = first + index < splits
        scores = tl.load(scores_ptr + row * splits + first + index, mask=inside, other=float("-inf"))
        ids = tl.load(ids_ptr + row * splits + first + index, mask=inside, other=2147483647)
        top = tl.max(scores, 0)
        candidate = tl.min(tl.where(scores == top, ids, 2147483647), 0)
        winner = tl.where((top > best) | (first == 0), candidate, winner)
        best = tl.maximum(best, top)
    tl.store(out_ptr + row, winner.to(tl.int64))
    if WITH_SCORE:
        tl.store(best_ptr + row, best)


def gumbel_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
    vocab_size: int | None = None,
    block: int = 1024,
    num_warps: int = 4,
    target_programs: int = TARGET_PROGRAMS,
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`reference.gumbel_sample` in two launches, no synchronisation, of all ids or those within `filter_bounds`.

    Block, warps and target_programs are for tuning: columns of a tile, and the programs that the vocabulary is split
    to reach.
    """
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    tuning = (block, num_warps, target_programs)
    _sample(logits, temperatures, seeds, positions, 0, vocab_size or logits.shape[1], out, None, bounds, tuning)
    return out


def gumbel_best(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_id: int,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.gumbel_best` in the same two launches; scores are in units of ln 2."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    best = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    tuning = (1024, 4, TARGET_PROGRAMS)
    _sample(logits, temperatures, seeds, positions, first_id, count, tokens, best, None, tuning)
    return best, tokens


def _sample(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor,
    first_id: int, vocab_size: int, out: torch.Tensor, best: torch.Tensor | None,
    bounds: tuple[torch.Tensor, torch.Tensor] | None, tuning: tuple[int, int, int],
) -> None:  # fmt: skip
    block, num_warps, target_programs = tuning
    batch = logits.shape[0]
    tiles = -(-vocab_size // block)
    tiles_each = -(-tiles // min(tiles, -(-target_programs // batch)))
    splits = -(-tiles // tiles_each)
    scores = torch.empty((batch, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((batch, splits), dtype=torch.int32, device=logits.device)
    _sample_kernel[(splits, batch)](
        logits,
        temperatures,
        seeds,
        positions.int(),  # as graphs have them: another type would be another kernel to compile
        *(bounds or (None, None)),
        scores,
        ids,
        logits.stride(0),
        tiles_each,
        FILTERED=bounds is not None,
        VOCAB=vocab_size,
        FIRST_ID=first_id,
        BLOCK=block,
        MIN_TEMP=GREEDY_BELOW,
        SCALE=LOG2_E,
        FAST=logits.is_cuda,
        num_warps=num_warps,
    )
    _pick_kernel[(batch,)](scores, ids, out, best, splits, BLOCK=256, WITH_SCORE=best is not None, num_warps=1)


def filtered_sample(
    logits: torch.Tensor, filters: Filters, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`sampler.filtered_sample` without sorting: a bound for each row, then the draw. No synchronisation."""
    bounds = filter_bounds(logits, filters.temperatures, filters.top_ks, filters.top_ps, filters.min_ps)
    return gumbel_sample(logits, filters.temperatures, seeds, positions, bounds=bounds)
