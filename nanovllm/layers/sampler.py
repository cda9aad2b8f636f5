"""From logits to token ids, for rows with parameters of their own.

Order of operations: temperature, then `top_p`, then one draw. The draw adds Gumbel noise to the scaled logits
and takes the largest (Gumbel-max), with noise made from (seed, position, token id) alone: what is drawn does
not depend on the rest of the batch.
"""

import torch

from nanovllm.layers.ops import Ops
from nanovllm.sampling_params import GREEDY_BELOW

CHUNK_ELEMENTS = 1 << 23  # logits sorted at once: bounds the memory that a full batch of filtered rows takes


def sample(
    ops: Ops,
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ps: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw one token id a row.

    Args:
        ops: `gumbel_sample` is used.
        logits: [num_rows, vocab_size], any float type.
        temperatures: [num_rows] float32, below 1e-5 means greedy.
        top_ps: [num_rows] float32, or None when no row filters.
        seeds: [num_rows] int64.
        positions: [num_rows] int64, place of the drawn token in its sequence.

    Returns:
        [num_rows] int64.
    """
    if top_ps is not None:
        logits = filter_top_p(logits, temperatures, top_ps)
    return ops.gumbel_sample(logits, temperatures, seeds, positions)


def filter_top_p(logits: torch.Tensor, temperatures: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Logits with -inf outside each row's smallest set of tokens whose probability reaches top_p.

    The token that crosses the bound belongs to the set, so there is always one. Rows with top_p = 1 or a greedy
    temperature stay as they are.
    """
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    parts = zip(logits.split(rows), temperatures.split(rows), top_ps.split(rows), strict=True)
    return torch.cat([_filter_rows(*part) for part in parts])


def _filter_rows(logits: torch.Tensor, temperatures: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    filtering = (top_ps < 1) & (temperatures >= GREEDY_BELOW)
    scaled = logits.float() / torch.where(filtering, temperatures, 1.0)[:, None]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    outside = probs.cumsum(dim=-1) - probs >= top_ps[:, None]
    outside &= filtering[:, None]
    return logits.masked_fill(torch.zeros_like(outside).scatter_(1, order, outside), float("-inf"))
