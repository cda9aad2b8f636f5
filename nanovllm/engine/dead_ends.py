"""Whether a completion can come to a place where nothing is left to generate.

A bad word rules its last token out where the others have just been drawn. Where few tokens are allowed, that may be all
of them; which of them is out next depends on the longest end of the completion that is the beginning of a bad word.
"""

from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

Ids = tuple[int, ...]


def dead_end(
    words: Collection[Ids], allowed: Iterable[int], ends: AbstractSet[int], min_tokens: int, max_tokens: int | None
) -> Ids | None:
    """Tokens after which none is left, as few as possible; None: there is always one.

    Args:
        words: the tokens of each bad word.
        allowed: ids that may come at all.
        ends: those that may not among the first `min_tokens`.
        max_tokens: tokens that are drawn at most; None: any number.
    """
    last = {word[-1] for word in words}.union(ends)
    few: set[int] = set()
    for token in allowed:
        if token not in last:
            return None
        few.add(token)
    beginnings = {word[:length] for word in words for length in range(len(word))} | {()}
    seen: dict[Ids, Ids] = {(): ()}  # ends of completions that are such beginnings, and the way to each
    frontier, depth = dict(seen), 0
    while frontier and (max_tokens is None or depth < max_tokens):
        if depth == min_tokens:
            frontier = dict(seen)  # from here on more may follow each
        left = few if depth >= min_tokens else few.difference(ends)
        found: dict[Ids, Ids] = {}
        for state, way in frontier.items():
            moves = left.difference(_ruled_out(state, words))
            if not moves:
                return way
            for token in moves:
                found.setdefault(_next(state, token, beginnings), (*way, token))
        depth += 1
        frontier = {state: way for state, way in found.items() if state not in seen}
        if not frontier and depth < min_tokens:
            frontier, depth = dict(seen), min_tokens  # nothing new comes before
        seen = {**frontier, **seen}
    return None


def _ruled_out(state: Ids, words: Collection[Ids]) -> set[int]:
    return {word[-1] for word in words if state[max(len(state) - len(word) + 1, 0) :] == word[:-1]}


def _next(state: Ids, token: int, beginnings: AbstractSet[Ids]) -> Ids:
    """The longest end of the state and the token that is the beginning of a word."""
    text = (*state, token)
    return next(text[i:] for i in range(len(text) + 1) if text[i:] in beginnings)
