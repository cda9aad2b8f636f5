"""What differs from replay to replay of a graph, in one packed int32 array that is the same on host and device."""

from dataclasses import dataclass
from typing import Generic

import numpy as np

from nanovllm.engine.step import ON_DEVICE, StepInput
from nanovllm.kernels.shared_prefixes import Array

MAX_PROMPTS = 64  # sequences with several tokens in one step
TOKEN_FIELDS = 6


@dataclass(frozen=True)
class GraphInputs(Generic[Array]):
    """Decodes first, then the prompts' tokens, then padding.

    Args:
        packed: [length(max_tokens)].
        max_tokens: of the largest graph.
    """

    packed: Array
    max_tokens: int

    @staticmethod
    def length(max_tokens: int) -> int:
        return TOKEN_FIELDS * max_tokens + 3 * (MAX_PROMPTS + 1) + 1

    @classmethod
    def padding(cls, max_tokens: int, padding_row: int) -> "GraphInputs[np.ndarray]":
        """Nothing but decodes of one token in the padding row."""
        values = GraphInputs(np.zeros(cls.length(max_tokens), dtype=np.int32), max_tokens)
        values.rows[:] = values.drawn_for[:] = padding_row
        values.prompt_rows[:] = padding_row
        values.context_lens[:] = values.decode_lens[:] = 1
        values.given[:] = ON_DEVICE
        return values

    @property
    def rows(self) -> Array:
        """[max_tokens] of each token"""
        return self.packed[: self.max_tokens]

    @property
    def context_lens(self) -> Array:
        """[max_tokens] that each token sees, itself included"""
        return self.packed[self.max_tokens : 2 * self.max_tokens]

    @property
    def given(self) -> Array:
        """[max_tokens] token ids, or `ON_DEVICE`"""
        return self.packed[2 * self.max_tokens : 3 * self.max_tokens]

    @property
    def decode_lens(self) -> Array:
        """[max_tokens] `context_lens` of decodes, 0 of prompts' tokens"""
        return self.packed[3 * self.max_tokens : 4 * self.max_tokens]

    @property
    def drawn_from(self) -> Array:
        """[max_tokens] tokens from which a next one is drawn, in order, then zeros"""
        return self.packed[4 * self.max_tokens : 5 * self.max_tokens]

    @property
    def drawn_for(self) -> Array:
        """[max_tokens] the rows of `drawn_from`"""
        return self.packed[5 * self.max_tokens : 6 * self.max_tokens]

    @property
    def prompt_rows(self) -> Array:
        """[MAX_PROMPTS + 1] of each prompt, behind an entry for all decodes"""
        first = TOKEN_FIELDS * self.max_tokens
        return self.packed[first : first + MAX_PROMPTS + 1]

    @property
    def prompt_lens(self) -> Array:
        """[MAX_PROMPTS + 1] contexts of prompts after this step; 0 for the decodes and what is not used"""
        first = TOKEN_FIELDS * self.max_tokens + MAX_PROMPTS + 1
        return self.packed[first : first + MAX_PROMPTS + 1]

    @property
    def prompt_starts(self) -> Array:
        """[MAX_PROMPTS + 2] the first token of the decodes, of each prompt, and the end of the last one"""
        return self.packed[TOKEN_FIELDS * self.max_tokens + 2 * (MAX_PROMPTS + 1) :]


def fill(values: GraphInputs[np.ndarray], inputs: StepInput, padding_row: int) -> None:
    """Write a step into what `GraphInputs.padding` has made."""
    n, lengths, decodes = len(inputs.token_ids), inputs.lengths, inputs.num_leading_decodes
    values.rows[:n] = inputs.rows if n == len(lengths) else np.repeat(inputs.rows, lengths)
    values.rows[n:] = padding_row
    values.context_lens[:n] = inputs.positions + 1
    values.context_lens[n:] = 1
    values.given[:n] = inputs.token_ids
    values.given[n:] = ON_DEVICE
    if inputs.draws_everywhere:
        return
    draws = inputs.num_draws
    values.drawn_from[:draws] = inputs.last_tokens
    values.drawn_from[draws:] = 0
    values.drawn_for[:draws] = inputs.rows[inputs.samples.astype(bool)]
    values.drawn_for[draws:] = padding_row
    values.decode_lens[:decodes] = values.context_lens[:decodes]
    values.decode_lens[decodes:n] = 0
    values.decode_lens[n:] = 1
    prompts = len(lengths) - decodes
    values.prompt_rows[1 : prompts + 1] = inputs.rows[decodes:]
    values.prompt_lens[1 : prompts + 1] = inputs.starts[decodes:] + lengths[decodes:]
    values.prompt_lens[prompts + 1 :] = 0
    values.prompt_starts[1] = decodes
    values.prompt_starts[2 : prompts + 2] = decodes + np.cumsum(lengths[decodes:])
    values.prompt_starts[prompts + 2 :] = n
