"""Parameters of tests that Triton's interpreter makes slow: few without a GPU, all on one."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def in_pairs(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of one value of each axis, of which so few run without a GPU that every two values meet.

    A value may be a tuple, for several parameters, or a `pytest.param` with marks of its own.
    """
    cases = [_joined(parts) for parts in product(*axes)]
    left = [(case, pairs) for case, pairs in zip(cases, _pairs(axes), strict=True) if not case.marks]
    missing = set().union(*(pairs for _, pairs in left))
    chosen = set()
    while missing:
        case, pairs = max(left, key=lambda entry: len(entry[1] & missing))
        missing -= pairs
        chosen.add(id(case))
    return [case if case.marks or id(case) in chosen else _on_a_gpu(case) for case in cases]


def _pairs(axes: Sequence[Sequence[Any]]) -> list[set[Any]]:
    """For each combination: which places on the axes it brings together, two at a time."""
    places = product(*(range(len(axis)) for axis in axes))
    return [set(combinations(enumerate(place), 2)) for place in places]


def _joined(parts: Sequence[Any]) -> Any:
    values, marks = [], []
    for part in parts:
        if hasattr(part, "marks"):
            marks += part.marks
            (part,) = part.values
        values += part if isinstance(part, tuple) else (part,)
    return pytest.param(*values, marks=marks)


def _on_a_gpu(case: Any) -> Any:
    return pytest.param(*case.values, marks=pytest.mark.gpu)
