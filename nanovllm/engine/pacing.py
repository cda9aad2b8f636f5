"""How many prompt tokens a step should take in, where that is fewer than it has room for.

A step runs as a CUDA graph when its tokens are few (`graph_runner`). One that does not waits for the host to launch
every kernel, which for a few prompt tokens beside many decodes takes several times as long. So when few prompt tokens
are left to compute, they are spread over steps that fit a graph, and the decodes go on meanwhile.

Large models have a second reason: a decode step with fewer rows than a matrix multiplication has room for waits for
the weights to be read, and could compute other tokens at no cost. `LLM.generate` answers when its last sequence is
through. So sequences that will take fewer steps than the longest one need not start at once: they can come in later,
longest ones first, and share their prompts' computation with the decodes of those that started before. That holds for
sequences that end by length alone and whose caller waits for the others anyway (`may_spread`), once there are rows and
memory for all of them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.engine.sequence import Sequence

ROUNDS = 4  # steps over which prompts are spread to fit graphs
TILE = 128  # rows that the kernels of matrix multiplication take together: a step is filled up to a multiple of it
# These take as long among many others as some ten steps that wait for the weights, and a third or more of that is
# saved: each so many of them may put off the end of the whole by one step.
TOKENS_A_STEP = 1600
MAX_SPREAD = 1024  # sequences, all of which are looked at in every step as long as they are spread


def may_spread(seqs: list[Sequence]) -> bool:
    """Whether these, all that wait or run, can be put off for each other, and none has been by a lack of memory."""
    batch = seqs[0].batch
    return len(seqs) <= MAX_SPREAD and all(
        seq.may_wait and seq.batch == batch and not seq.num_preemptions for seq in seqs
    )


def longest_first(waiting: Iterable[Sequence]) -> list[Sequence]:
    """Those with more tokens to come start earlier, equal ones in order of arrival."""
    return sorted(waiting, key=_steps_to_come, reverse=True)


@dataclass(frozen=True)
class Pacer:
    """Bounds the prompt tokens of steps.

    Args:
        graph_tokens: tokens of the largest graph.
        graph_prompts: prompts in a graph at most.
        spreads: let sequences that may wait start later.
    """

    graph_tokens: int
    graph_prompts: int
    spreads: bool

    def prompt_tokens(self, num_decodes: int, prompts: Iterable[Sequence]) -> int | None:
        """Prompt tokens that a step should take in; None: as many as it has room for.

        Args:
            num_decodes: tokens in the step already.
            prompts: sequences with prompt tokens to compute; at least one. No more of them are looked at than it takes.
        """
        if not num_decodes:
            return None
        room = self.graph_tokens - num_decodes
        count = left = of_first = 0  # the first ones, as many as a graph holds
        for count, seq in enumerate(prompts, 1):
            left += seq.num_uncomputed_tokens
            of_first = left if count <= self.graph_prompts else of_first
            # No graph has the logits of a prompt's tokens.
            if left > ROUNDS * room or count > ROUNDS * self.graph_prompts or seq.needs_prompt_scores:
                return None
        return min(room, of_first)

    def spread_tokens(self, num_decodes: int, prompts: list[Sequence], running: Iterable[Sequence]) -> int | None:
        """The same for sequences that `may_spread`; None: spreading would cost more than it brings.

        Args:
            num_decodes: tokens in the step already.
            prompts: with prompt tokens to compute, in the order in which they will be; at least one.
            running: those that run, in the middle of their prompt or not.
        """
        of_first = sum(seq.num_uncomputed_tokens for seq in prompts[: self.graph_prompts])
        room = min(self.graph_tokens - num_decodes, of_first)
        rate = _rate(prompts, running)
        if rate > room:
            return None
        tiles = math.ceil((num_decodes + rate) / TILE)
        return min(tiles * TILE - num_decodes, room) if num_decodes else room


def _rate(prompts: list[Sequence], running: Iterable[Sequence]) -> float:
    """Prompt tokens needed in every step from now on for all to be through when the longest one is."""
    left = sum(seq.num_uncomputed_tokens for seq in prompts)
    end = max(map(_steps_to_come, [*running, *prompts])) + left / TOKENS_A_STEP
    tokens, rate = 0, 0.0
    for seq in prompts:
        tokens += seq.num_uncomputed_tokens
        rate = max(rate, tokens / (end - _steps_to_come(seq)))
    return rate


def _steps_to_come(seq: Sequence) -> int:
    return seq.max_len - seq.num_tokens
