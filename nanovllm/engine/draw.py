"""The draw of a step that asks for more than temperature: edits, penalties, filters and log-probabilities."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.engine.logit_edits import LogitEdits, RowHistory
from nanovllm.engine.step import RowState, StepInput
from nanovllm.layers.ops import Ops
from nanovllm.layers.sampler import apply_masks, apply_penalties, top_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

Drawn = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]  # tokens, (ids, log-probabilities)


class Drawer:
    """Draws tokens and keeps the rows' last tokens and, once a request has penalties, their token counts."""

    def __init__(self, rows: RowState, ops: Ops, vocab_size: int):
        self._rows = rows
        self._vocab_size = vocab_size
        self._ops = ops
        # [num_rows + 1, vocab_size], made when the first penalised request comes: most engines never need them.
        self._in_prompt: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        inputs: StepInput,
        previous: torch.Tensor | None = None,
    ) -> Drawn:
        """Sample one token a row and remember it as the row's last.

        Args:
            logits: [n, vocab_size] of the sequences that sample, in order.
            rows: [n] int64.
            positions: [n] int64, places of the drawn tokens.
            inputs: the step.
            previous: [n] int64, the rows' last tokens, if somebody has put others there meanwhile.
        """
        state, edits = self._rows, inputs.edits
        if previous is None:
            previous = state.last_tokens[rows]
        edited = logits if edits is None else self._edit(logits, rows, edits, previous)
        if inputs.any_filtered:
            tokens = self._ops.filtered_sample(edited, state.filters(rows), state.seeds[rows], positions)
        else:
            tokens = self._ops.gumbel_sample(edited, state.temperatures[rows], state.seeds[rows], positions)
        state.last_tokens[rows] = tokens
        if edits is not None and edits.penalised_rows.size:
            assert self._counts is not None
            at = self._tensor(edits.penalised_rows)
            self._counts[rows[at], tokens[at]] += 1
        logprobs = top_logprobs(logits, tokens, inputs.num_logprobs) if inputs.num_logprobs >= 0 else None
        return tokens, logprobs

    def _edit(
        self, logits: torch.Tensor, rows: torch.Tensor, edits: LogitEdits, previous: torch.Tensor
    ) -> torch.Tensor:
        logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
        if edits.masked_rows.size:
            at, masks = self._tensor(edits.masked_rows), torch.from_numpy(edits.masks).to(logits.device)
            logits[at] = apply_masks(logits[at], masks)
        if edits.allowed_rows.size:
            at, ids = self._tensor(edits.allowed_rows), self._tensor(edits.allowed_ids)
            kept = torch.full_like(logits, float("-inf"))
            kept[at, ids] = logits[at, ids]
            limited = self._tensor(np.unique(edits.allowed_rows))
            logits[limited] = kept[limited]
        if edits.bias_rows.size:
            index = (self._tensor(edits.bias_rows), self._tensor(edits.bias_ids))
            logits.index_put_(index, torch.from_numpy(edits.bias_values).to(logits.device), accumulate=True)
        if edits.ban_rows.size:
            at, ids, after = self._tensor(edits.ban_rows), self._tensor(edits.ban_ids), self._tensor(edits.ban_after)
            bans = torch.where(previous[at] == after, float("-inf"), 0.0)
            logits.index_put_((at, ids), bans, accumulate=True)
        if edits.penalised_rows.size:
            assert self._counts is not None
            assert self._in_prompt is not None
            at = self._tensor(edits.penalised_rows)
            which = rows[at]
            penalties = torch.from_numpy(np.ascontiguousarray(edits.penalties)).to(logits.device)
            logits[at] = apply_penalties(logits[at], self._in_prompt[which], self._counts[which], penalties)
        return logits

    def start_counting(self, history: RowHistory) -> None:
        """Count the known text of a sequence that just got its row: in that very step, which may not sample yet."""
        vocab_size = self._vocab_size
        device = self._rows.last_tokens.device
        if self._counts is None:
            shape = (self._rows.padding_row + 1, vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        assert self._in_prompt is not None
        counts = np.bincount(history.completion_ids, minlength=vocab_size).astype(np.int32)
        self._counts[history.row] = torch.from_numpy(counts).to(device)
        self._in_prompt[history.row] = False
        self._in_prompt[history.row, self._tensor(history.prompt_ids)] = True

    def _tensor(self, array: "np.ndarray | Seq[int]") -> torch.Tensor:
        return torch.from_numpy(np.asarray(array, dtype=np.int64)).to(self._rows.last_tokens.device)
