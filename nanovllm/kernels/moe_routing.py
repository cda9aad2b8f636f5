"""From router logits to tiles of tokens that share an expert, on the device and without waiting for it.

A *pair* is a token and one of its experts, numbered token * top_k + slot. Pairs are sorted by expert, and by token
within one; the GEMMs work on tiles of at most `block_m` sorted pairs of one expert. How many tiles there are is known
on the device alone: buffers and grids have room for the most there can be, and the rest are marked as empty.

Tokens are cut into chunks, one a program. As each token chooses an expert at most once, a chunk's choices are a 0/1
matrix [tokens, experts], whose sums and running sums down the columns give every pair its place. Where one chunk holds
all the tokens that is one launch, else two: counts of all chunks have to be there before pairs can be placed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Routing(NamedTuple):
    """Who computes what, for one batch."""

    weights: torch.Tensor  # [pairs] float32, by pair
    pairs: torch.Tensor  # [pairs] int32, sorted by expert
    tiles: torch.Tensor  # [max_tiles, 3] int32: expert, first of its sorted pairs, how many (0: empty)


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Most tiles there can be: each expert in use leaves at most one tile that is not full."""
    used = min(num_pairs, num_experts)
    return min(num_pairs, (num_pairs + used * (block_m - 1)) // block_m)


@triton.jit
def _choose(
    logits_ptr, tokens, num_tokens,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr, CHUNK: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """(slot, weight), both [CHUNK, PAD]: where an expert stands among a token's choices (-1: not chosen)."""
    expert = tl.arange(0, PAD)[None, :]
    rows = logits_ptr + tl.minimum(tokens, num_tokens - 1).to(tl.int64)[:, None] * EXPERTS
    logits = tl.load(rows + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    exps = tl.exp(logits - tl.max(logits, 1)[:, None])
    weights = exps / tl.sum(exps, 1)[:, None]
    left = tl.where(expert < EXPERTS, weights, -1.0)
    slots = tl.full([CHUNK, PAD], -1, tl.int32)
    total = tl.zeros([CHUNK], tl.float32)
    for slot in tl.static_range(TOP_K):
        best, index = tl.max(left, 1, return_indices=True)
        hit = expert == tl.minimum(index, EXPERTS - 1)[:, None]  # NaN must not lead to an expert that is not there
        slots = tl.where(hit, slot, slots)
        left = tl.where(hit, -1.0, left)
        total += best
    if NORMALIZE:
        weights = weights / total[:, None]
    return tl.where((tokens < num_tokens)[:, None], slots, -1), weights


@triton.jit
def _place(slots, before, total, tokens, pairs_ptr, TOP_K: tl.constexpr):
    """Write a chunk's pairs to their sorted places.

    before, total: [PAD], an expert's pairs in the chunks before this one, and in all
    Returns the place of each expert's first pair.
    """
    chosen = (slots >= 0).to(tl.int32)
    first = tl.cumsum(total, 0) - total
    places = (first + before)[None, :] + tl.cumsum(chosen, 0) - chosen
    tl.store(pairs_ptr + places, tokens[:, None] * TOP_K + slots, mask=slots >= 0)
    return first


@triton.jit
def _write_tiles(first, total, tiles_ptr, num_tiles, PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Cut the experts' sorted pairs into tiles; first, total: [PAD]."""
    expert = tl.arange(0, PAD)
    count = (total + BLOCK_M - 1) // BLOCK_M
    index = tl.cumsum(count, 0) - count
    for i in range(0, tl.max(count, 0)):
        tile = tiles_ptr + (index + i) * 3
        tl.store(tile, expert, mask=i < count)
        tl.store(tile + 1, first + i * BLOCK_M, mask=i < count)
        tl.store(tile + 2, tl.minimum(total - i * BLOCK_M, BLOCK_M), mask=i < count)
    for start in range(tl.sum(count, 0), num_tiles, PAD):
        tl.store(tiles_ptr + (start + expert) * 3 + 2, tl.zeros([PAD], tl.int32), mask=start + expert < num_tiles)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _route_kernel(
    logits_ptr, weights_ptr, slots_ptr, counts_ptr, pairs_ptr, tiles_ptr, num_tokens, num_tiles,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    NORMALIZE: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose experts; a program that is `ALONE` also places the pairs, others leave their experts and counts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, PAD)
    slots, weights = _choose(logits_ptr, tokens, num_tokens, EXPERTS, PAD, TOP_K, CHUNK, NORMALIZE)
    pair = tokens[:, None] * TOP_K + slots
    tl.store(weights_ptr + pair, weights, mask=slots >= 0)
    total = tl.sum((slots >= 0).to(tl.int32), 0)
    if ALONE:
        first = _place(slots, tl.zeros([PAD], tl.int32), total, tokens, pairs_ptr, TOP_K)
        _write_tiles(first, total, tiles_ptr, num_tiles, PAD, BLOCK_M)
    else:
        inside = (tokens < num_tokens)[:, None] & (expert < EXPERTS)[None, :]
        tl.store(slots_ptr + tokens.to(tl.int64)[:, None] * EXPERTS + expert[None, :], slots.to(tl.int8), mask=inside)
        tl.store(counts_ptr + chunk * PAD + expert, total)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _place_kernel(
    slots_ptr, counts_ptr, pairs_ptr, tiles_ptr, num_tokens, num_tiles,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The second launch: every program adds up all chunks' counts, places its own pairs; the first cuts the tiles."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    num_chunks = tl.num_programs(0)
    expert = tl.arange(0, PAD)
    before = tl.zeros([PAD], tl.int32)
    total = tl.zeros([PAD], tl.int32)
    for start in range(0, num_chunks, 16):
        others = start + tl.arange(0, 16)
        counts = tl.load(
            counts_ptr + others[:, None] * PAD + expert[None, :], mask=(others < num_chunks)[:, None], other=0
        )
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((others < chunk)[:, None], counts, 0), 0)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (tokens < num_tokens)[:, None] & (expert < EXPERTS)[None, :]
    slots_at = slots_ptr + tokens.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    slots = tl.load(slots_at, mask=inside, other=-1).to(tl.int32)
    first = _place(slots, before, total, tokens, pairs_ptr, TOP_K)
    if chunk == 0:
        _write_tiles(first, total, tiles_ptr, num_tiles, PAD, BLOCK_M)


def chunk_size(num_tokens: int) -> int:
    """Tokens a program: few where programs would be few, more where the sum over all chunks' counts would be long."""
    return 16 if num_tokens <= 1024 else 64


def route(logits: torch.Tensor, top_k: int, normalize: bool, block_m: int, pdl: bool = False) -> Routing:
    """`moe_reference.route`, sorted by expert and cut into tiles. Equal weights go to the expert that comes first.

    logits: [num_tokens, num_experts] contiguous, at most 1024 experts
    block_m: pairs in a tile
    pdl: programmatic dependent launch: let the launches overlap the end of the ones before
    """
    num_tokens, num_experts = logits.shape
    num_pairs, device = num_tokens * top_k, logits.device
    num_tiles = max_tiles(num_pairs, num_experts, block_m)
    routing = Routing(
        weights=torch.empty(num_pairs, dtype=torch.float32, device=device),
        pairs=torch.empty(num_pairs, dtype=torch.int32, device=device),
        tiles=torch.empty((num_tiles, 3), dtype=torch.int32, device=device),
    )
    chunk = chunk_size(num_tokens)
    num_chunks = -(-num_tokens // chunk)
    alone = num_chunks == 1
    pad = triton.next_power_of_2(num_experts)
    slots = counts = routing.pairs  # not used where one program does it all
    if not alone:
        slots = torch.empty((num_tokens, num_experts), dtype=torch.int8, device=device)
        counts = torch.empty((num_chunks, pad), dtype=torch.int32, device=device)
    sizes = {"EXPERTS": num_experts, "PAD": pad, "TOP_K": top_k, "CHUNK": chunk, "BLOCK_M": block_m, "PDL": pdl}
    placed = (routing.pairs, routing.tiles, num_tokens, num_tiles)
    launch = {"num_warps": 4 if chunk == 16 else 8, "launch_pdl": pdl}
    _route_kernel[(num_chunks,)](
        logits, routing.weights, slots, counts, *placed, NORMALIZE=normalize, ALONE=alone, **sizes, **launch
    )
    if not alone:
        _place_kernel[(num_chunks,)](slots, counts, *placed, **sizes, **launch)
    return routing
