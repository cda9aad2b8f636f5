"""The draw of a step that asks for more than temperature: edits, penalties, filters and log-probabilities.

Everything is queued without waiting for the device: a step of a graph is drawn again from the graph's logits, in a
handful of launches that do not depend on how long the sequences are.
"""

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.engine.logit_edits import LogitEdits
from nanovllm.engine.step import RowState, StepInput
from nanovllm.layers.ops import Ops
from nanovllm.layers.sampler import IN_PROMPT, apply_masks, top_logprobs

Drawn = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]  # tokens, (ids, log-probabilities)
Send = Callable[..., list[torch.Tensor]]  # int32 arrays to the device, in one transfer


class Drawer:
    """Draws tokens and keeps the rows' last tokens and, once a request has penalties, what has occurred in each."""

    def __init__(self, rows: RowState, ops: Ops, vocab_size: int):
        self._rows = rows
        self._vocab_size = vocab_size
        self._ops = ops
        # [num_rows + 1, vocab_size] int32, see `sampler.penalise`; made when the first penalised request comes: most
        # engines never need it. Only rows of penalised sequences are right.
        self._occurrences: torch.Tensor | None = None

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        inputs: StepInput,
        send: Send,
        previous: torch.Tensor | None = None,
    ) -> Drawn:
        """Sample one token a row and remember it as the row's last.

        Args:
            logits: [n, vocab_size] of the sequences that sample, in order.
            rows: [n] int64.
            positions: [n] int64, places of the drawn tokens.
            inputs: the step.
            send: for its edits.
            previous: [n] int64, the rows' last tokens, if somebody has put others there meanwhile.
        """
        state, edits = self._rows, inputs.edits
        if previous is None:
            previous = state.last_tokens[rows]
        edited = logits if edits is None else _edit(logits, edits, previous, send)
        if inputs.any_penalised:
            assert self._occurrences is not None
            edited = self._ops.penalise(edited, rows, self._occurrences, state.penalties)
        if inputs.any_filtered:
            tokens = self._ops.filtered_sample(edited, state.filters(rows), state.seeds[rows], positions)
        else:
            tokens = self._ops.gumbel_sample(edited, state.temperatures[rows], state.seeds[rows], positions)
        state.last_tokens[rows] = tokens
        if inputs.any_penalised:
            assert self._occurrences is not None
            self._occurrences[rows, tokens] += 1
        logprobs = top_logprobs(logits, tokens, inputs.num_logprobs) if inputs.num_logprobs >= 0 else None
        return tokens, logprobs

    def start_counting(
        self,
        rows: torch.Tensor,
        prompt_rows: torch.Tensor,
        prompt_ids: torch.Tensor,
        completion_rows: torch.Tensor,
        completion_ids: torch.Tensor,
    ) -> None:
        """Count the known text of sequences that just got their rows; `Histories` on the device."""
        if self._occurrences is None:
            shape = (self._rows.padding_row + 1, self._vocab_size)
            self._occurrences = torch.zeros(shape, dtype=torch.int32, device=rows.device)
        self._occurrences.index_fill_(0, rows.long(), 0)
        flat = self._occurrences.view(-1)
        flat.index_fill_(0, prompt_rows.long() * self._vocab_size + prompt_ids, IN_PROMPT)
        places = completion_rows.long() * self._vocab_size + completion_ids
        flat.scatter_add_(0, places, torch.ones_like(completion_ids))


def _edit(logits: torch.Tensor, edits: LogitEdits, previous: torch.Tensor, send: Send) -> torch.Tensor:
    """A changed copy, [n, vocab_size] float32."""
    logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
    limited_rows, places = np.unique(edits.allowed_rows, return_inverse=True)
    masked, masks, limited, allowed, allowed_ids, bias_rows, bias_ids, bias_bits, ban_rows, ban_ids, after = send(
        edits.masked_rows,
        edits.masks,
        limited_rows,
        places.astype(np.int32),
        edits.allowed_ids,
        edits.bias_rows,
        edits.bias_ids,
        edits.bias_values.view(np.int32),
        edits.ban_rows,
        edits.ban_ids,
        edits.ban_after,
    )
    if len(masked):
        at = masked.long()
        logits[at] = apply_masks(logits[at], masks)
    if len(limited):
        at, index = limited.long(), (allowed.long(), allowed_ids.long())
        before = logits[at]
        kept = torch.full_like(before, float("-inf"))
        kept[index] = before[index]
        logits[at] = kept
    if len(bias_rows):
        logits.index_put_((bias_rows.long(), bias_ids.long()), bias_bits.view(torch.float32), accumulate=True)
    if len(ban_rows):
        at = ban_rows.long()
        bans = torch.where(previous[at] == after, float("-inf"), 0.0)
        logits.index_put_((at, ban_ids.long()), bans, accumulate=True)
    return logits
