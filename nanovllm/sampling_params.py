"""How one request is sampled. A new parameter is one field, one check and its use in the sampler."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

GREEDY_BELOW = 1e-5  # a lower temperature would overflow the division and means "the most likely token" anyway
MAX_LOGPROBS = 20
MAX_N = 2**14
GRAMMARS = ("json_schema", "regex", "choice", "grammar")  # what a completion can be made to follow


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request. Names and meanings are those of vLLM.

    Order of operations on a row of logits: log-probabilities are taken; the grammar's mask or `allowed_token_ids`;
    `bad_words`, `min_tokens` and `logit_bias`; repetition, frequency and presence penalty; temperature; `top_k`;
    `top_p`, of the probabilities that `top_k` leaves; `min_p`; draw. Of equally likely tokens a filter keeps those with
    the lower ids.

    Args:
        temperature: divides the logits; 0 (anything below 1e-5) always takes the most likely token.
        top_p: in (0, 1]; sample from the smallest set of tokens whose probability reaches `top_p`
            (the token that crosses it belongs to the set). 1 switches the filter off.
        top_k: sample from the `top_k` most likely tokens; 0 or -1, or more than the vocabulary has, is off.
        min_p: in [0, 1]; drop tokens less likely than `min_p` times the most likely one. 0 is off.
        seed: 64-bit seed of this request's draws; None derives one from the engine's seed and the request's number.
        n: number of completions, at most 16384.
        max_tokens: upper bound on generated tokens, at least 1; None is as many as the model's window allows.
        min_tokens: nothing but length ends the completion before it has so many tokens.
        repetition_penalty: above 0; divides positive and multiplies negative logits of every token that the prompt or
            the completion holds. 1 is off.
        presence_penalty: in [-2, 2]; subtracted from the logit of every token in the completion.
        frequency_penalty: in [-2, 2]; subtracted once for each time that the token is in the completion.
        logit_bias: {token id: -100 to 100}, added to the logits.
        allowed_token_ids: draw from these ids only; None is off.
        bad_words: strings that the completion never spells in the tokenizer's own tokens for them, alone or after a
            space: the last token of one is ruled out where the others have just been generated. Refused where no token
            might be left.
        stop: a string or strings that end the completion when they appear in its text.
        stop_token_ids: ids that end the completion.
        include_stop_str_in_output: leave the stop string in `text`.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: report the log-probability of each drawn token and of so many most likely ones (0 to 20),
            of the model's own distribution, before temperature and filters.
        prompt_logprobs: report the same for each prompt token but the first. Such a prompt is computed whole: none of
            its KV is taken from the prefix cache.
        json_schema: the completion is JSON that this schema (a dict, or its text) describes. Of this and the next three
            at most one is given; they need the extra `structured` (llguidance) and go with neither `allowed_token_ids`,
            `bad_words` nor `min_tokens`. The completion ends with "stop" where nothing can follow, or with an
            end-of-sequence token where the grammar allows an end, `ignore_eos` or not; one that `max_tokens`, the
            window or a stop cuts short is only the beginning of a match. Such a request waits for each of its tokens
            before it goes on, while its batch-mates overlap.
        regex: the completion matches this expression (of Rust's `regex`), as a whole.
        choice: the completion is one of these strings.
        grammar: the completion is a sentence of this Lark grammar (llguidance's dialect).
        detokenize: make `text`, and the texts of tokens in `logprobs`; False leaves them None.
        skip_special_tokens: leave special tokens out of `text`.

    Raises:
        TypeError: a value of the wrong type, or an unknown name.
        ValueError: a value out of range or not finite.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 64
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] = ()
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in (
            "bad_words",
            "stop",
            "stop_token_ids",
        ):  # callers that come from vLLM pass None; read back, it is ()
            if getattr(self, name) is None:
                self._set(name, ())
        self._set("temperature", checked_real("temperature", self.temperature, 0, 1e30))
        self._set("top_p", checked_real("top_p", self.top_p, 0, 1))
        if self.top_p == 0:
            raise ValueError("top_p must be above 0, got 0")
        self._set("min_p", checked_real("min_p", self.min_p, 0, 1))
        self._set("repetition_penalty", checked_real("repetition_penalty", self.repetition_penalty, 1e-6, 1e6))
        self._set("presence_penalty", checked_real("presence_penalty", self.presence_penalty, -2, 2))
        self._set("frequency_penalty", checked_real("frequency_penalty", self.frequency_penalty, -2, 2))
        self._set("top_k", checked_int("top_k", self.top_k, -1))
        self._set("n", checked_int("n", self.n, 1, MAX_N))
        self._set("min_tokens", checked_int("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None:
            self._set("max_tokens", checked_int("max_tokens", self.max_tokens, 1))
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.seed is not None:
            self._set("seed", checked_int("seed", self.seed, -(2**63), 2**63 - 1))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, checked_int(name, getattr(self, name), 0, MAX_LOGPROBS))
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.bad_words, (tuple, list)) or not all(isinstance(s, str) for s in self.bad_words):
            raise TypeError(f"bad_words must be a list of strings, got {self.bad_words!r}")
        if not all(self.bad_words):
            raise ValueError("bad_words must not hold an empty string")
        self._set("bad_words", tuple(self.bad_words))
        self._normalise_stops()
        self._normalise_ids()
        self._normalise_grammar()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # a plain Python number in a frozen dataclass

    def _normalise_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (tuple, list)) or not all(isinstance(s, str) for s in stop):
            raise TypeError(f"stop must be a string or a list of strings, got {self.stop!r}")
        if not all(stop):
            raise ValueError("stop must not hold an empty string")
        if stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")
        self._set("stop", tuple(stop))
        self._set("stop_token_ids", checked_ids("stop_token_ids", self.stop_token_ids))

    def _normalise_ids(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            biases = {
                checked_int("logit_bias token id", token_id, 0): checked_real("logit_bias", bias, -100, 100)
                for token_id, bias in self.logit_bias.items()
            }
            self._set("logit_bias", biases)
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", checked_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must hold at least one id")

    def _normalise_grammar(self) -> None:
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"only one of {' and '.join(given)} can be followed")
        for name in given:
            self._set(name, checked_grammar(name, getattr(self, name)))
            others = {"allowed_token_ids": self.allowed_token_ids is not None, "bad_words": bool(self.bad_words)}
            for other, used in {**others, "min_tokens": self.min_tokens > 0}.items():
                if used:  # together they may leave no token at all
                    raise ValueError(f"{name} and {other} cannot be combined")

    @property
    def grammar_source(self) -> tuple[str, str] | None:
        """(which of the four kinds, its text), if one is given."""
        for name in GRAMMARS:
            value = getattr(self, name)
            if value is not None:
                return name, value if isinstance(value, str) else json.dumps(value)
        return None

    def token_ids_by_name(self) -> dict[str, tuple[int, ...]]:
        """Every token id that the parameters name, to be checked against a vocabulary."""
        return {
            "stop_token_ids": tuple(self.stop_token_ids),
            "logit_bias token id": tuple(self.logit_bias or ()),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
        }

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def edits_logits(self) -> bool:
        """Whether logits change before penalties and draw, for some token of the completion."""
        named = self.logit_bias or self.allowed_token_ids is not None
        return bool(named or self.bad_words or self.grammar_source) or self.min_tokens > 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether a filter narrows the draw; greedy needs none."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def checked_real(name: str, value: object, low: float, high: float) -> float:
    """`value` as a float, or a TypeError or ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high:  # type: ignore[operator] # also False for NaN
        raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value}")
    return float(value)


def checked_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int (numpy's would overflow in sums), or a TypeError or ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if number < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if high is not None and number > high:
        raise ValueError(f"{name} must be at most {high}, got {value}")
    return number


def checked_grammar(name: str, value: object) -> str | tuple[str, ...]:
    """A text, for `choice` a tuple of texts."""
    if name == "choice":
        if not isinstance(value, (tuple, list)) or not all(isinstance(text, str) for text in value):
            raise TypeError(f"choice must be a list of strings, got {value!r}")
        if not value or not all(value):
            raise ValueError("choice must hold at least one string, and no empty one")
        return tuple(value)
    if name == "json_schema" and not isinstance(value, str):
        if not isinstance(value, Mapping):
            raise TypeError(f"json_schema must be a dict or a string, got {value!r}")
        try:
            return json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"json_schema cannot be written as JSON: {error}") from error
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    if not value.strip():
        raise ValueError(f"{name} must not be empty")
    return value


def checked_ids(name: str, ids: object) -> tuple[int, ...]:
    """A tuple of token ids from a list or tuple of them."""
    if not isinstance(ids, (tuple, list)):
        raise TypeError(f"{name} must be a list of integers, got {ids!r}")
    return tuple(checked_int(name, token_id, 0) for token_id in ids)
