"""What changes a batch's logits before the draw, as compact host arrays.

Most requests need none of it: then a step carries None, and nothing here runs.
"""

from dataclasses import dataclass

import numpy as np

from nanovllm.engine.scheduler import Batch, Scheduled

NEVER = float("-inf")


@dataclass(frozen=True)
class Histories:
    """The known text of sequences that just got their rows: what their penalties start from. All int32."""

    rows: np.ndarray  # [H]
    prompt_rows: np.ndarray  # [P] the row of each token
    prompt_ids: np.ndarray  # [P]
    completion_rows: np.ndarray  # [C]
    completion_ids: np.ndarray  # [C]


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


def build_logit_edits(batch: Batch, eos_token_ids: frozenset[int]) -> LogitEdits | None:
    """Edits of a step, or None when no logit of it changes."""
    sampling = [item for item in batch.items if item.samples]
    edited = [(i, item) for i, item in enumerate(sampling) if item.seq.edits_logits]
    bias = [(i, *pair) for i, item in edited for pair in _biases(item, eos_token_ids)]
    bans = [(i, *ban) for i, item in edited if item.seq.bad_words for ban in _bans(item)]
    bias += [(i, token_id, NEVER) for i, token_id, after in bans if after is None]
    open_bans = [(i, token_id, after) for i, token_id, after in bans if after is not None]
    allowed = [(i, t) for i, item in edited for t in item.seq.params.allowed_token_ids or ()]
    masked = [(i, item.seq.grammar.mask()) for i, item in edited if item.seq.grammar is not None]
    if not (bias or open_bans or allowed or masked):
        return None
    return LogitEdits(
        masked_rows=np.array([i for i, _ in masked], dtype=np.int32),
        masks=np.array([mask for _, mask in masked], dtype=np.int32),
        bias_rows=np.array([i for i, _, _ in bias], dtype=np.int32),
        bias_ids=np.array([t for _, t, _ in bias], dtype=np.int32),
        bias_values=np.array([v for _, _, v in bias], dtype=np.float32),
        **_columns(open_bans),
        allowed_rows=np.array([i for i, _ in allowed], dtype=np.int32),
        allowed_ids=np.array([t for _, t in allowed], dtype=np.int32),
    )


def build_histories(batch: Batch) -> Histories | None:
    """Of the penalised sequences that got their rows in this step, which may not sample yet."""
    admitted = [seq for seq in batch.admitted if seq.is_penalised]
    if not admitted:
        return None
    prompts = [seq.token_ids[: seq.num_prompt_tokens] for seq in admitted]
    completions = [seq.completion_token_ids for seq in admitted]
    rows = np.array([seq.row for seq in admitted], dtype=np.int32)
    return Histories(
        rows,
        np.repeat(rows, [len(ids) for ids in prompts]),
        np.concatenate([np.array(ids, dtype=np.int32) for ids in prompts]),
        np.repeat(rows, [len(ids) for ids in completions]),
        np.concatenate([np.array(ids, dtype=np.int32) for ids in completions]),
    )


def _biases(item: Scheduled, eos_token_ids: frozenset[int]) -> list[tuple[int, float]]:
    params = item.seq.params
    biases = list(params.logit_bias.items()) if params.logit_bias else []
    if params.min_tokens and item.end - item.seq.num_prompt_tokens < params.min_tokens:
        biases += [(token_id, NEVER) for token_id in eos_token_ids.union(params.stop_token_ids)]
    return biases


def _bans(item: Scheduled) -> list[tuple[int, int | None]]:
    """(token that would complete a bad word, token that has to come before it; None: it does)."""
    seq, bans = item.seq, list[tuple[int, int | None]]()
    num_known = len(seq.token_ids)
    unknown = item.end - num_known  # drawn, not yet heard of
    assert 0 <= unknown <= 1
    for *before, last in seq.bad_words:
        if len(before) > item.end - seq.num_prompt_tokens:
            continue
        seen = before[: len(before) - unknown]
        if seq.token_ids[num_known - len(seen) :] == seen:
            bans.append((last, before[-1] if before and unknown else None))
    return bans


def _columns(bans: list[tuple[int, int, int]]) -> dict[str, np.ndarray]:
    rows, ids, after = np.array(bans, dtype=np.int32).reshape(-1, 3).T
    return {"ban_rows": rows, "ban_ids": ids, "ban_after": after}
