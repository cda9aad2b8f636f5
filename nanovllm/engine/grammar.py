"""Structured output: which tokens a grammar allows next, by the optional package `llguidance`.

A grammar is a function of the tokens so far, so a sequence that has one waits for each of its tokens before its next
step is built (`Sequence.waits_for_tokens`); the mask goes to the device packed, one bit a token.
"""

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

import numpy as np

from nanovllm.sampling_params import SamplingParams

MAX_COMPILED = 64  # grammars kept compiled


class Grammar:
    """Where one completion stands in its grammar.

    Args:
        matcher: llguidance's, at the beginning.
        executor: llguidance's, of threads that compute masks.
        vocab_size: of the model's logits.
    """

    def __init__(self, matcher: Any, executor: Any, vocab_size: int):
        self._matcher = matcher
        self._executor = executor
        self._vocab_size = vocab_size
        self._num_tokens = 0

    @staticmethod
    def masks(grammars: "Seq[Grammar]") -> np.ndarray:
        """[n, ceil(vocab_size / 32)] int32, the bit of each token that may come next (the lowest bit is token 0).

        Args:
            grammars: of the same engine, one or more.
        """
        masks = np.empty((len(grammars), -(-grammars[0]._vocab_size // 32)), dtype=np.int32)
        matchers = [(grammar._matcher, i) for i, grammar in enumerate(grammars)]
        grammars[0]._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks[0].nbytes, len(masks))
        return masks

    def push(self, token_ids: Seq[int]) -> bool:
        """Take tokens in; whether nothing can follow them."""
        self._num_tokens += len(token_ids)
        if not self._matcher.consume_tokens(list(token_ids)):
            raise RuntimeError(f"the grammar does not go on with tokens {list(token_ids)}: {self._matcher.get_error()}")
        return bool(self._matcher.is_stopped())

    @property
    def num_tokens(self) -> int:
        """Tokens taken in."""
        return self._num_tokens


class GrammarCompiler:
    """Makes the grammars of requests; the tokenizer's table is built when the first one comes.

    Args:
        tokenizer: of the model, or None.
        vocab_size: of the model's logits.
        eos_token_ids: any of them ends a completion that its grammar allows to end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._table: Any = None
        self._executor: Any = None
        self._compiled = lru_cache(MAX_COMPILED)(self._compile)

    def check(self, params: SamplingParams, name: str) -> None:
        """Compile what the parameters ask for.

        Raises:
            ValueError: a grammar that is wrong, or a model or an installation that cannot have one.
        """
        if params.grammar_source is None:
            return
        try:
            self._compiled(*params.grammar_source)
        except (ValueError, ImportError) as error:
            raise ValueError(f"{name}: {error}") from error

    def start(self, params: SamplingParams) -> Grammar | None:
        """The grammar of a new completion, if it has one."""
        if params.grammar_source is None:
            return None
        matcher = self._compiled(*params.grammar_source).deep_copy()
        return Grammar(matcher, self._executor, self._vocab_size)

    def _compile(self, kind: str, source: str) -> Any:
        llguidance = _package()
        matcher = llguidance.LLMatcher
        make = {
            "json_schema": matcher.grammar_from_json_schema,
            "regex": matcher.grammar_from_regex,
            "choice": lambda text: llguidance.grammar_from("choice", text),
            "grammar": matcher.grammar_from_lark,
        }[kind]
        table = self._tokens()
        grammar = make(source)
        wrong = matcher.validate_grammar(grammar, table)
        if wrong:
            raise ValueError(f"{kind} {source[:80]!r} is not accepted: {wrong}")
        return matcher(table, grammar)

    def _tokens(self) -> Any:
        if self._table is None:
            if self._tokenizer is None:
                raise ValueError("the model came without a tokenizer, so no grammar can be followed")
            if not self._eos_token_ids:
                raise ValueError("the model has no end-of-sequence token, which a grammar needs to end")
            import llguidance.hf

            self._table = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids)
            )
            self._executor = _package().LLExecutor()
        return self._table


def _package() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(
            "json_schema, regex, choice and grammar need the package llguidance: pip install 'nano-vllm[structured]'"
        ) from error
    return llguidance
