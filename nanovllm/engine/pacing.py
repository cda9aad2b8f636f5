"""How many prompt tokens a step should take in, where that is fewer than it has room for.

A step runs as a CUDA graph when its tokens are few (`graph_runner`). One that does not waits for the host to launch
every kernel, which for a few prompt tokens beside many decodes takes several times as long. So when few prompt tokens
are left to compute, they are spread over steps that fit a graph, and the decodes go on meanwhile.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nanovllm.engine.sequence import Sequence

ROUNDS = 4  # steps over which prompts are spread


@dataclass(frozen=True)
class Pacer:
    """Bounds the prompt tokens of steps.

    Args:
        graph_tokens: tokens of the largest graph.
        max_reread: `GraphRunner.max_reread`.
    """

    graph_tokens: int
    max_reread: int

    def prompt_tokens(self, num_decodes: int, prompts: Seq[Sequence]) -> int | None:
        """Prompt tokens that a step should take in; None: as many as it has room for.

        Args:
            num_decodes: tokens in the step already.
            prompts: sequences with prompt tokens to compute; at least one.
        """
        if any(seq.needs_prompt_scores for seq in prompts):
            return None  # no graph has the logits of a prompt's tokens
        # As many as fit a graph without reading the longest prompt again too often: n tokens see half of it on average.
        room = min(self.graph_tokens - num_decodes, 2 * self.max_reread // max(seq.num_tokens for seq in prompts))
        if num_decodes and sum(seq.num_uncomputed_tokens for seq in prompts) <= ROUNDS * room:
            return room
        return None
