"""Where bad words may leave nothing to generate, against trying out every completion."""

import random

import pytest

from nanovllm.engine.dead_ends import dead_end


def all_ways(words, allowed, ends, min_tokens, max_tokens):
    """Every completion of fewer than `max_tokens` tokens after which none is left."""
    stuck, ways = [], [()]
    for depth in range(max_tokens):
        found = []
        for way in ways:
            out = {w[-1] for w in words if len(w) - 1 <= depth and way[depth - len(w) + 1 :] == w[:-1]}
            moves = set(allowed) - out - (ends if depth < min_tokens else set())
            found += [(*way, token) for token in moves]
            if not moves:
                stuck.append(way)
        ways = found
    return stuck


@pytest.mark.parametrize("seed", range(300))
def test_dead_ends_are_those_that_trying_finds(seed):
    rng = random.Random(seed)
    allowed = rng.sample(range(4), rng.randint(1, 3))
    words = [
        tuple(rng.choice(range(4)) for _ in range(rng.choice([1, 2, 2, 2, 3, 3]))) for _ in range(rng.randint(0, 6))
    ]
    ends, min_tokens, max_tokens = set(rng.sample(range(4), rng.choice([0, 1]))), rng.choice([0, 0, 2]), 6
    way, ways = dead_end(words, allowed, ends, min_tokens, max_tokens), all_ways(words, allowed, ends, min_tokens, 6)
    if ends and min_tokens:  # it may take a state for one that also comes later: never the other way round
        assert way is not None or not ways
    else:
        assert way in ways if ways else way is None
        assert way is None or len(way) == min(map(len, ways))


def test_what_is_drawn_last_leads_nowhere():
    assert dead_end([(1, 1), (1, 2)], [1, 2], set(), 0, 1) is None
    assert dead_end([(1, 1), (1, 2)], [1, 2], set(), 0, 2) == (1,)
    assert dead_end([(1, 1), (1, 2)], range(1000), set(), 0, None) is None
    assert dead_end([(1, 1)], [1, 2], {2}, 10**9, None) == (1,)
    assert dead_end([(1, 1)], [1, 2], set(), 10**9, None) is None
