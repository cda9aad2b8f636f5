"""From logits to token ids, for rows with parameters of their own.

The draw adds Gumbel noise to the scaled logits and takes the largest (Gumbel-max), with noise made from (seed,
position, token id) alone: what is drawn does not depend on the rest of the batch. The order of operations before it
is documented in `SamplingParams`.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels import reference
from nanovllm.sampling_params import GREEDY_BELOW

CHUNK_ELEMENTS = 1 << 23  # logits sorted at once: bounds the memory that a full batch of filtered rows takes

IN_PROMPT = 1 << 30  # beside the number of occurrences in a completion, which has fewer tokens


@dataclass(frozen=True)
class Filters:
    """Which tokens a row may draw, one value a row."""

    temperatures: torch.Tensor  # [n] float32, below 1e-5 means greedy: nothing is filtered
    top_ks: torch.Tensor  # [n] int32, 0 or below is off
    top_ps: torch.Tensor  # [n] float32, 1 is off
    min_ps: torch.Tensor  # [n] float32, 0 is off

    def split(self, rows: int) -> list["Filters"]:
        parts = (
            self.temperatures.split(rows),
            self.top_ks.split(rows),
            self.top_ps.split(rows),
            self.min_ps.split(rows),
        )
        return [Filters(*part) for part in zip(*parts, strict=True)]


def apply_filters(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Logits [n, vocab_size] with -inf where `top_k`, `top_p` or `min_p` of a row rule a token out.

    `top_p` works on the probabilities that `top_k` leaves, as in vLLM; the token that crosses the bound is kept, so
    there is always one. Of equal logits the lower ids come first. Rows without filters stay as they are.
    """
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return torch.cat([_filter(part, f) for part, f in zip(logits.split(rows), filters.split(rows), strict=True)])


def _filter(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    vocab_size = logits.shape[1]
    drawing = filters.temperatures >= GREEDY_BELOW
    scaled = logits.float() / torch.where(drawing, filters.temperatures, 1.0)[:, None]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab_size, device=logits.device)
    limits = torch.where(filters.top_ks > 0, filters.top_ks, vocab_size)
    outside = ranks >= limits[:, None]
    probs = ordered.masked_fill(outside, float("-inf")).softmax(dim=-1)
    outside |= (probs.cumsum(dim=-1) - probs >= filters.top_ps[:, None]) & (filters.top_ps < 1)[:, None]
    outside |= probs < filters.min_ps[:, None] * probs[:, :1]
    outside &= drawing[:, None]
    outside[:, 0] = False  # a bound may vanish in float32: the most likely token always stays
    return logits.masked_fill(torch.zeros_like(outside).scatter_(1, order, outside), float("-inf"))


def filtered_sample(
    logits: torch.Tensor, filters: Filters, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draw a token id a row, [n] int64, from what its filters leave; seeds and positions as in `gumbel_sample`."""
    return reference.gumbel_sample(apply_filters(logits, filters), filters.temperatures, seeds, positions)


def apply_masks(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocab_size] with -inf where a row's bit is 0; masks: [n, ceil(vocab_size / 32)] int32."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    words, shifts = ids // 32, (ids % 32).int()
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    parts = zip(logits.split(rows), masks.split(rows), strict=True)
    return torch.cat([part.masked_fill((some[:, words] >> shifts) & 1 == 0, float("-inf")) for part, some in parts])


def penalise(
    logits: torch.Tensor, rows: torch.Tensor, occurrences: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    """Repetition (Keskar et al., 2019), frequency and presence penalty, as vLLM and OpenAI define them.

    Args:
        logits: [n, vocab_size], any float type.
        rows: [n] int64, of the next two.
        occurrences: [num_rows, vocab_size] int32: how often a token is in the completion, plus IN_PROMPT if the
            prompt holds it.
        penalties: [3, num_rows] float32: repetition, presence, frequency; 1, 0, 0 is none.

    Returns:
        [n, vocab_size] float32.
    """
    repetition, presence, frequency = penalties[:, rows, None]
    logits, occurred = logits.float(), occurrences[rows]
    counts = occurred & (IN_PROMPT - 1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(occurred > 0, repeated, logits) - counts * frequency - (counts > 0) * presence


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the model's own distribution.

    Args:
        logits: [n, vocab_size], untouched.
        tokens: [n] int64, the drawn ones.
        count: most likely tokens to report; all of them, if there are fewer.

    Returns:
        (token ids, log-probabilities), both [n, 1 + count]; the drawn token first.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.topk(min(count, logits.shape[1]), dim=-1)
    drawn = tokens[:, None]
    return torch.cat([drawn, ids], dim=-1), torch.cat([logprobs.gather(1, drawn), values], dim=-1)
