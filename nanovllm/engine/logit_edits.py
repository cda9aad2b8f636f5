"""What changes a batch's logits before the draw, as compact host arrays.

Most requests need none of it: then a step carries None, and nothing here runs.
"""

from dataclasses import dataclass

import numpy as np

from nanovllm.engine.scheduler import Batch, Scheduled
from nanovllm.engine.sequence import Sequence

NEVER = float("-inf")


@dataclass(frozen=True)
class RowHistory:
    """The known text of a sequence that just got its row: what its penalties start from."""

    row: int
    prompt_ids: np.ndarray  # int32
    completion_ids: np.ndarray  # int32


@dataclass(frozen=True)
class LogitEdits:
    """Rows are indices among the step's sampling sequences, in order."""

    masked_rows: np.ndarray  # [M] int32
    masks: np.ndarray  # [M, ceil(vocab_size / 32)] int32, a bit for each token that may come
    bias_rows: np.ndarray  # [E] int32
    bias_ids: np.ndarray  # [E] int32
    bias_values: np.ndarray  # [E] float32, added; -inf bans
    ban_rows: np.ndarray  # [B] int32: bans of `ban_ids` that hold if the row's last token, which only the device
    ban_ids: np.ndarray  # [B] int32   may know yet, is `ban_after`
    ban_after: np.ndarray  # [B] int32
    allowed_rows: np.ndarray  # [A] int32: every other token of these rows is banned
    allowed_ids: np.ndarray  # [A] int32
    penalised_rows: np.ndarray  # [P] int32
    penalties: np.ndarray  # [3, P] float32: repetition, presence, frequency
    histories: list[RowHistory]


def build_logit_edits(batch: Batch, eos_token_ids: frozenset[int]) -> LogitEdits | None:
    """Edits of a step, or None when no sequence in it has any."""
    histories = [_history(seq) for seq in batch.admitted if seq.params.penalised]
    sampling = [item for item in batch.items if item.samples]
    edited = [(i, item) for i, item in enumerate(sampling) if item.seq.params.edits_logits]
    if not edited and not histories:
        return None
    bias = [(i, *pair) for i, item in edited for pair in _biases(item, eos_token_ids)]
    bans = [(i, *ban) for i, item in edited for ban in _bans(item)]
    bias += [(i, token_id, NEVER) for i, token_id, after in bans if after is None]
    open_bans = [(i, token_id, after) for i, token_id, after in bans if after is not None]
    allowed = [(i, t) for i, item in edited for t in item.seq.params.allowed_token_ids or ()]
    penalised = [(i, item.seq.params) for i, item in edited if item.seq.params.penalised]
    masked = [(i, item.seq.grammar.mask()) for i, item in edited if item.seq.grammar is not None]
    return LogitEdits(
        masked_rows=np.array([i for i, _ in masked], dtype=np.int32),
        masks=np.array([mask for _, mask in masked], dtype=np.int32),
        bias_rows=np.array([i for i, _, _ in bias], dtype=np.int32),
        bias_ids=np.array([t for _, t, _ in bias], dtype=np.int32),
        bias_values=np.array([v for _, _, v in bias], dtype=np.float32),
        **_columns(open_bans),
        allowed_rows=np.array([i for i, _ in allowed], dtype=np.int32),
        allowed_ids=np.array([t for _, t in allowed], dtype=np.int32),
        penalised_rows=np.array([i for i, _ in penalised], dtype=np.int32),
        penalties=np.array(
            [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for _, p in penalised], dtype=np.float32
        )
        .reshape(-1, 3)
        .T,
        histories=histories,
    )


def _biases(item: Scheduled, eos_token_ids: frozenset[int]) -> list[tuple[int, float]]:
    params = item.seq.params
    biases = list((params.logit_bias or {}).items())
    if item.end - item.seq.num_prompt_tokens < params.min_tokens:
        biases += [(token_id, NEVER) for token_id in eos_token_ids.union(params.stop_token_ids)]
    return biases


def _bans(item: Scheduled) -> list[tuple[int, int | None]]:
    """(token that would complete a bad word, token that has to come before it; None: it does)."""
    seq, bans = item.seq, list[tuple[int, int | None]]()
    known = seq.token_ids[seq.num_prompt_tokens :]
    unknown = item.end - len(seq.token_ids)  # drawn, not yet heard of
    assert 0 <= unknown <= 1
    for *before, last in seq.bad_words:
        if len(before) > len(known) + unknown:
            continue
        seen = before[: len(before) - unknown]
        if known[len(known) - len(seen) :] == seen:
            bans.append((last, before[-1] if before and unknown else None))
    return bans


def _columns(bans: list[tuple[int, int, int]]) -> dict[str, np.ndarray]:
    rows, ids, after = np.array(bans, dtype=np.int32).reshape(-1, 3).T
    return {"ban_rows": rows, "ban_ids": ids, "ban_after": after}


def _history(seq: Sequence) -> RowHistory:
    n = seq.num_prompt_tokens
    return RowHistory(seq.row, np.array(seq.token_ids[:n], np.int32), np.array(seq.token_ids[n:], np.int32))
