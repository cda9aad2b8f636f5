"""How one request is sampled. A new parameter is one field, one check and its use in the sampler."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

GREEDY_BELOW = 1e-5  # a lower temperature would overflow the division and means "the most likely token" anyway


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request.

    Args:
        temperature: divides the logits; 0 (anything below 1e-5) always takes the most likely token.
        top_p: in (0, 1]; sample from the smallest set of tokens whose probability reaches `top_p`
            (the token that crosses it belongs to the set). 1 switches the filter off.
        max_tokens: upper bound on generated tokens, at least 1.
        ignore_eos: go on after an end-of-sequence token, until `max_tokens`.

    Raises:
        TypeError: a value of the wrong type, or an unknown name.
        ValueError: a value out of range or not finite.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        _check_real("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, Integral):
            raise TypeError(f"max_tokens must be an integer, got {self.max_tokens!r}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _check_real(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
