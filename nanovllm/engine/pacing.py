"""How many prompt tokens a step should take in, where that is fewer than it has room for.

A step runs as a CUDA graph when its tokens are few (`graph_runner`). One that does not waits for the host to launch
every kernel, which for a few prompt tokens beside many decodes takes several times as long. So when few prompt tokens
are left to compute, they are spread over steps that fit a graph, and the decodes go on meanwhile.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.engine.sequence import Sequence

ROUNDS = 4  # steps over which prompts are spread


@dataclass(frozen=True)
class Pacer:
    """Bounds the prompt tokens of steps.

    Args:
        graph_tokens: tokens of the largest graph.
    """

    graph_tokens: int

    def prompt_tokens(self, num_decodes: int, prompts: Iterable[Sequence]) -> int | None:
        """Prompt tokens that a step should take in; None: as many as it has room for.

        Args:
            num_decodes: tokens in the step already.
            prompts: sequences with prompt tokens to compute; at least one. No more of them are looked at than it takes.
        """
        if not num_decodes:
            return None
        room, left = self.graph_tokens - num_decodes, 0
        for seq in prompts:
            left += seq.num_uncomputed_tokens
            # No graph has the logits of a prompt's tokens.
            if left > ROUNDS * room or seq.needs_prompt_scores:
                return None
        return room
