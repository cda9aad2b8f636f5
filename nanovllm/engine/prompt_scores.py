"""Log-probabilities of prompt tokens: which positions of a step they come from, and whose they are."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.engine.scheduler import Batch, Logprobs
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import top_logprobs

if TYPE_CHECKING:
    from nanovllm.models.decoder import DecoderForCausalLM

CHUNK_ELEMENTS = 1 << 24  # logits computed at once: bounds the memory that a long prompt takes


@dataclass(frozen=True)
class PromptScores:
    """M prompt tokens to score in a step, each by the logits of the token before it."""

    places: np.ndarray  # [M] int32, of the tokens before them, in the step
    targets: np.ndarray  # [M] int32, the tokens themselves
    count: int  # most likely tokens to report with each
    owners: list[tuple[Sequence, int, int]]  # (sequence, position of its first target, number), in order


def build_prompt_scores(batch: Batch) -> PromptScores | None:
    """What the step's prompt tokens allow to score; None when nobody asks."""
    if not any(item.seq.needs_prompt_scores for item in batch.items):
        return None
    places: list[int] = []
    targets: list[int] = []
    owners: list[tuple[Sequence, int, int]] = []
    first = 0
    for seq, start, num_tokens, _, _ in batch.items:
        if seq.needs_prompt_scores:
            scored = range(start + 1, min(start + num_tokens, seq.num_prompt_tokens - 1) + 1)
            places.extend(first + position - 1 - start for position in scored)
            targets.extend(seq.token_ids[scored.start : scored.stop])
            owners.append((seq, scored.start, len(scored)))
        first += num_tokens
    if not places:
        return None
    count = max(seq.params.prompt_logprobs or 0 for seq, _, _ in owners)
    return PromptScores(np.array(places, dtype=np.int32), np.array(targets, dtype=np.int32), count, owners)


def score_hidden(
    model: "DecoderForCausalLM", hidden: torch.Tensor, targets: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(ids [M, 1 + count], log-probabilities), the target first; None on other ranks than 0.

    hidden: [M, hidden_size], targets: [M] int64.
    """
    rows = max(1, CHUNK_ELEMENTS // model.spec.vocab_size)
    parts = []
    for some, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = model.gather_logits(model.compute_logits(some))
        if logits is not None:
            parts.append(top_logprobs(logits, wanted, count))
    return (torch.cat([ids for ids, _ in parts]), torch.cat([values for _, values in parts])) if parts else None


def record_prompt_scores(scores: PromptScores, results: list[Logprobs]) -> None:
    """Give each sequence its own; a position that it has from before a preemption stays as it is."""
    at = 0
    for seq, first, number in scores.owners:
        count = 1 + (seq.params.prompt_logprobs or 0)
        for position, (ids, values) in enumerate(results[at : at + number], first):
            if position == len(seq.prompt_logprobs):
                seq.prompt_logprobs.append(dict(zip(ids[:count], values[:count], strict=True)))
        at += number
