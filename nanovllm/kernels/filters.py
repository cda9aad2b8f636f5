"""Which tokens `top_k`, `top_p` and `min_p` leave, found without sorting: a bound on the logits for each row.

In order of falling logits, of equal ones the lower id first, every filter keeps a beginning. So a row's filters come
down to a floor and, for logits that equal it, to the last id that stays. One program a row searches the floor: it
sums the weights (1 for `top_k`, probabilities for `top_p`) of the logits above three trial floors at once and goes on
between two of them, until one distinct value is left. Once few enough logits lie in between, they are copied out and
only those are read. Sums run in an order that is the same in every batch, so a row's tokens do not depend on others.
"""

import torch
import triton
import triton.language as tl

from nanovllm.sampling_params import GREEDY_BELOW

MAX_STEPS = 100  # each takes three quarters of the range away, or a distinct value: never reached
LOG2_E = tl.constexpr(1.4426950408889634)
MANY = tl.constexpr(2147483647)  # as a rank: all of them; as an id: beyond any


@triton.jit
def _load(base, tile, limit, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """[LANES, WIDTH] float32: tile number `tile` of `limit` values (a multiple of WIDTH), -inf beyond them."""
    first = (tile * LANES + tl.arange(0, LANES)) * WIDTH
    pointers = base + (first[:, None] + tl.arange(0, WIDTH)[None, :])
    if WIDTH > 1:  # `base` is one of two buffers, both aligned, which the compiler may fail to see
        pointers = tl.multiple_of(pointers, [16, 16])
    return tl.load(pointers, mask=(first < limit)[:, None], other=float("-inf")).to(tl.float32)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _extremes(base, limit, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """(largest value of each place of a tile over all tiles, smallest value above -inf)."""
    tops = tl.full([LANES, WIDTH], float("-inf"), tl.float32)
    least = tl.full([LANES], float("inf"), tl.float32)
    for tile in range(0, tl.cdiv(limit, LANES * WIDTH)):
        x = _load(base, tile, limit, LANES, WIDTH)
        tops = tl.maximum(tops, x)
        least = tl.minimum(least, tl.min(tl.where(x > float("-inf"), x, float("inf")), 1))
    return tops, tl.min(least, 0)


@triton.jit
def _rough_floor(tops, k, low, high):
    """A value that at least k logits reach, and not many more: k of the largest values of k different places do."""
    steps = 24
    while steps > 0:
        middle = low + (high - low) * 0.5
        reach = _sum((tops >= middle).to(tl.int32))
        low = tl.where(reach >= k, middle, low)
        high = tl.where(reach >= k, high, middle)
        steps = tl.where((reach >= k) & (reach <= 2 * k), 0, steps - 1)
    return low


@triton.jit
def _compact(base, limit, lists, low, high, LANES: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """Copy the values in [low, high) to `lists`, tiles whose free places hold -inf; return the number of tiles.

    Each place of a tile collects its own values. More than DEPTH tiles means that some values are missing.
    """
    place = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    held = tl.zeros([LANES, WIDTH], tl.int32)
    tl.debug_barrier()  # others may still read what the lists held before
    for tile in range(0, tl.cdiv(limit, LANES * WIDTH)):
        x = _load(base, tile, limit, LANES, WIDTH)
        inside = (x >= low) & (x < high)
        values = x.to(lists.dtype.element_ty)  # as they were: no rounding
        tl.store(lists + held * (LANES * WIDTH) + place, values, mask=inside & (held < DEPTH))
        held += inside.to(tl.int32)
    depth = tl.max(tl.max(held, 1), 0)
    for tile in range(0, tl.minimum(depth, DEPTH)):
        nothing = tl.full([LANES, WIDTH], float("-inf"), tl.float32).to(lists.dtype.element_ty)
        tl.store(lists + tile * (LANES * WIDTH) + place, nothing, mask=tile >= held)
    tl.debug_barrier()  # values are read by other threads than wrote them
    return depth


@triton.jit
def _weights(x, top, scale, BY_MASS: tl.constexpr):
    """1, or the probability relative to the largest logit's."""
    if BY_MASS:
        return tl.exp2((x - top) * scale)
    return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _mass_above(base, limit, floor, top, scale, LANES: tl.constexpr, WIDTH: tl.constexpr):
    mass = tl.zeros([LANES], tl.float32)
    for tile in range(0, tl.cdiv(limit, LANES * WIDTH)):
        x = _load(base, tile, limit, LANES, WIDTH)
        mass += tl.sum(tl.where(x > floor, _weights(x, top, scale, True), 0.0), 1)
    return tl.sum(mass, 0)


@triton.jit
def _look(base, limit, low, high, a, b, c, top, scale, BY_MASS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Of the values in [low, high): weights from a, b and c on, their number, the smallest and the largest."""
    from_a = tl.zeros([LANES], tl.float32)
    from_b = tl.zeros([LANES], tl.float32)
    from_c = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.int32)
    least = tl.full([LANES], float("inf"), tl.float32)
    most = tl.full([LANES], float("-inf"), tl.float32)
    for tile in range(0, tl.cdiv(limit, LANES * WIDTH)):
        x = _load(base, tile, limit, LANES, WIDTH)
        inside = (x >= low) & (x < high)
        weights = tl.where(inside, _weights(x, top, scale, BY_MASS), 0.0)
        from_a += tl.sum(tl.where(x >= a, weights, 0.0), 1)
        from_b += tl.sum(tl.where(x >= b, weights, 0.0), 1)
        from_c += tl.sum(tl.where(x >= c, weights, 0.0), 1)
        number += tl.sum(inside.to(tl.int32), 1)
        least = tl.minimum(least, tl.min(tl.where(inside, x, float("inf")), 1))
        most = tl.maximum(most, tl.max(tl.where(inside, x, float("-inf")), 1))
    a_sum, b_sum, c_sum = tl.sum(from_a, 0), tl.sum(from_b, 0), tl.sum(from_c, 0)
    return a_sum, b_sum, c_sum, tl.sum(number, 0), tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _search(
    base,
    limit,
    lists,
    compact,
    low,
    high,
    target,
    top,
    scale,
    BY_MASS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The value in [low, high) at which the weights, summed from the largest on, reach `target`; `low` if none does.

    `compact`: 1 when `base` is the lists already. Returns (value, weights above it, how many logits equal it; 0 when
    all of those from the value on belong to the result).
    """
    above = tl.full([], 0.0, tl.float32)  # weights from `high` on; at `low` the target is reached
    ties = tl.full([], 0, tl.int32)
    steps = STEPS
    while steps > 0:
        quarter = (high - low) * 0.25
        a, b, c = low + quarter, low + 2 * quarter, low + 3 * quarter
        from_a, from_b, from_c, number, least, most = _look(
            base, limit, low, high, a, b, c, top, scale, BY_MASS, LANES, WIDTH
        )
        if least >= most:  # one distinct value, or none
            low = tl.where(number > 0, most, low)
            ties = number
            steps = 0
        else:
            at_c, at_b, at_a = above + from_c >= target, above + from_b >= target, above + from_a >= target
            above += tl.where(at_c, 0.0, tl.where(at_b, from_c, tl.where(at_a, from_b, from_a)))
            new_high = tl.where(at_c, high, tl.where(at_b, c, tl.where(at_a, b, a)))
            new_low = tl.where(at_c, c, tl.where(at_b, b, tl.where(at_a, a, low)))
            new_low = tl.maximum(new_low, least)
            # No float between them splits the values: they differ by less than a rounding, and all stay.
            steps = tl.where((new_low > low) | (new_high < high), steps - 1, 0)
            low, high = new_low, new_high
            if (steps > 0) & (compact == 0) & (number <= 2 * LANES * WIDTH):
                depth = _compact(base, limit, lists, low, high, LANES, WIDTH, DEPTH)
                if depth <= DEPTH:
                    base = lists
                    limit = depth * (LANES * WIDTH)
                    compact += 1
    return low, above, ties


@triton.jit
def _id_of_tie(base, limit, value, rank, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Id of the logit number `rank`, from 1 on in order of ids, among those that equal `value`."""
    place = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    found = tl.full([], 2147483647, tl.int32)
    seen = tl.full([], 0, tl.int32)
    tile = tl.full([], 0, tl.int32)
    while tile * (LANES * WIDTH) < limit:
        equal = (_load(base, tile, limit, LANES, WIDTH) == value).to(tl.int32)
        in_lane = tl.sum(equal, 1)
        here = tl.sum(in_lane, 0)
        if seen + here >= rank:
            order = seen + (tl.cumsum(in_lane, 0) - in_lane)[:, None] + tl.cumsum(equal, 1)
            hits = (equal > 0) & (order == rank)
            found = tl.min(tl.min(tl.where(hits, tile * (LANES * WIDTH) + place, MANY), 1), 0)
            tile += limit  # ends the loop
        seen += here
        tile += 1
    return found


@triton.jit
def _row_bound(
    base,
    lists,
    temperature,
    top_k,
    top_p,
    min_p,
    VOCAB: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """(floor, last id that stays of the logits that equal it) of one row."""
    floor = tl.full([], float("-inf"), tl.float32)
    last_id = tl.full([], 2147483647, tl.int32)
    scale = LOG2_E / temperature
    tops, low = _extremes(base, VOCAB, LANES, WIDTH)
    top = tl.max(tl.max(tops, 1), 0)
    if (top > float("-inf")) & (top < float("inf")):
        high = top + tl.maximum(tl.abs(top) * 4.8e-7, 1e-30)  # above every logit
        values = base
        limit = tl.full([], VOCAB, tl.int32)
        compact = tl.full([], 0, tl.int32)
        rank = tl.full([], 2147483647, tl.int32)  # of the logits that equal the floor so many stay,
        ties = tl.full([], 0, tl.int32)  # if there are more
        if (top_k > 0) & (top_k < VOCAB):
            if top_k <= LANES * WIDTH // 8:
                low = _rough_floor(tops, top_k, low, top)
                depth = _compact(base, limit, lists, low, high, LANES, WIDTH, DEPTH)
                if depth <= DEPTH:
                    values = lists
                    limit = depth * (LANES * WIDTH)
                    compact += 1
            floor, above, ties = _search(
                values, limit, lists, compact, low, high, top_k, top, scale, False, STEPS, LANES, WIDTH, DEPTH
            )
            rank = top_k - above.to(tl.int32)
            low = floor
        if top_p < 1:
            at_floor = tl.where(rank < ties, rank, ties) * tl.exp2((floor - top) * scale)
            target = top_p * (_mass_above(values, limit, floor, top, scale, LANES, WIDTH) + at_floor)
            # All logits further below the top one have less than 1 - top_p together.
            low = tl.maximum(low, top - temperature * (1.0 + tl.log(VOCAB / (1.0 - top_p))))
            value, above, equal = _search(
                values, limit, lists, compact, low, high, target, top, scale, True, STEPS, LANES, WIDTH, DEPTH
            )
            missing = tl.ceil((target - above) / tl.exp2((value - top) * scale))
            needed = tl.minimum(tl.maximum(missing, 1.0), 1e9).to(tl.int32)
            rank = tl.where(value > floor, needed, tl.minimum(rank, needed))
            ties = equal
            floor = value
        if min_p > 0:
            least_likely = top + tl.log(min_p) * temperature
            ties = tl.where(least_likely > floor, 0, ties)
            floor = tl.maximum(floor, least_likely)
        if rank < ties:
            last_id = _id_of_tie(base, VOCAB, floor, rank, LANES, WIDTH)
    return floor, last_id


@triton.jit
def _bounds_kernel(
    logits_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    floors_ptr,
    last_ids_ptr,
    lists_ptr,
    row_stride,
    VOCAB: tl.constexpr,
    MIN_TEMP: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_ks_ptr + row)
    top_p = tl.load(top_ps_ptr + row)
    min_p = tl.load(min_ps_ptr + row)
    floor = tl.full([], float("-inf"), tl.float32)
    last_id = tl.full([], 2147483647, tl.int32)
    if (temperature >= MIN_TEMP) & (((top_k > 0) & (top_k < VOCAB)) | (top_p < 1) | (min_p > 0)):
        base = logits_ptr + row.to(tl.int64) * row_stride
        lists = lists_ptr + row.to(tl.int64) * (DEPTH * LANES * WIDTH)
        floor, last_id = _row_bound(base, lists, temperature, top_k, top_p, min_p, VOCAB, STEPS, LANES, WIDTH, DEPTH)
    tl.store(floors_ptr + row, floor)
    tl.store(last_ids_ptr + row, last_id)


def filter_bounds(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    tile: int = 8192,
    depth: int = 8,
    num_warps: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `sampler.apply_filters` keeps: logits above a row's floor, and of those that equal it ids up to its last.

    Args:
        logits: [n, vocab_size], rows contiguous.
        temperatures, top_ks, top_ps, min_ps: [n], as in `sampler.Filters`.
        tile, depth, num_warps: for tuning: values looked at together, and how many tiles of them the lists hold.

    Returns:
        (floors [n] float32, last ids [n] int32); -inf and 2^31 - 1 where nothing is filtered. One launch, no
        synchronisation; programs of rows without filters end at once.
    """
    n, vocab_size = logits.shape
    width = 8 if vocab_size % 8 == 0 and logits.stride(0) % 8 == 0 and logits.data_ptr() % 16 == 0 else 1
    floors = torch.empty(n, dtype=torch.float32, device=logits.device)
    last_ids = torch.empty(n, dtype=torch.int32, device=logits.device)
    lists = torch.empty((n, depth * tile), dtype=logits.dtype, device=logits.device)
    _bounds_kernel[(n,)](
        logits,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        floors,
        last_ids,
        lists,
        logits.stride(0),
        VOCAB=vocab_size,
        MIN_TEMP=GREEDY_BELOW,
        STEPS=MAX_STEPS,
        LANES=tile // width,
        WIDTH=width,
        DEPTH=depth,
        num_warps=num_warps,
    )
    return floors, last_ids
