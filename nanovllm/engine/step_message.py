"""A step as bytes: what ranks other than 0 need of it, which is less than rank 0 needs.

    | counts and flags, 8 int32 | rows | starts | ... arrays of `StepInput`, int32, but for those that say nothing |

Edits of logits, penalties, log-probabilities and whose prompt it is that gets scored stay on rank 0, which draws where
they matter. What decodes share is sent when it is another than in the step before.
"""

import struct

import numpy as np

from nanovllm.engine.prompt_scores import PromptScores
from nanovllm.engine.step import ON_DEVICE, ROW_PARAMS, StepInput
from nanovllm.kernels.shared_prefixes import SharedPrefixes

HEADER = struct.Struct("<8i")
PLAIN, DECODE, ALL_SAMPLE, SHARED, SHARED_CHANGED = (1 << bit for bit in range(5))


class StepEncoder:
    """Remembers what the readers know already."""

    def __init__(self) -> None:
        self._shared: SharedPrefixes[np.ndarray] | None = None

    def encode(self, inputs: StepInput) -> list[bytes]:
        """Parts of the message. Each message has to be sent."""
        scores, shared = inputs.prompt_scores, inputs.shared
        decode, all_sample = inputs.is_decode, bool(inputs.samples.all())
        flags = PLAIN * inputs.is_plain | DECODE * decode | ALL_SAMPLE * all_sample | SHARED * (shared is not None)
        arrays = [inputs.rows, inputs.starts]
        if not decode:
            arrays += [inputs.lengths, inputs.token_ids]
        if not all_sample:
            arrays.append(inputs.samples)
        arrays += [inputs.table_changes, inputs.row_params]
        if scores is not None:
            arrays += [scores.places, scores.targets]
        if shared is not None and shared is not self._shared:
            flags |= SHARED_CHANGED
            arrays.append(shared.packed)
            self._shared = shared
        counts = (
            len(inputs.rows),
            len(inputs.token_ids),
            inputs.table_changes.shape[1],
            inputs.row_params.shape[1],
            -1 if scores is None else len(scores.places),
            0 if scores is None else scores.count,
            len(shared.packed) if flags & SHARED_CHANGED and shared is not None else 0,
        )
        return [HEADER.pack(*counts, flags), *(array.tobytes() for array in arrays)]


class StepDecoder:
    """The other end.

    Args:
        max_batch, max_items: of the attention backend's list of shared prefixes, if it has one.
    """

    def __init__(self, max_batch: int = 0, max_items: int = 0):
        self._limits = (max_batch, max_items)
        self._shared: SharedPrefixes[np.ndarray] | None = None

    def decode(self, message: bytes) -> StepInput:
        """The step, whose arrays are views of `message`.

        Raises:
            ValueError: a message of another length than its counts make.
        """
        sequences, tokens, changes, params, scored, count, packed, flags = HEADER.unpack_from(message)
        values, at = np.frombuffer(message, dtype=np.int32, offset=HEADER.size), 0

        def take(size: int) -> np.ndarray:
            nonlocal at
            at += size
            return values[at - size : at]

        rows, starts = take(sequences), take(sequences)
        if flags & DECODE:
            lengths, token_ids = np.ones(sequences, np.int32), np.full(sequences, ON_DEVICE, np.int32)
        else:
            lengths, token_ids = take(sequences), take(tokens)
        samples = np.ones(sequences, np.int32) if flags & ALL_SAMPLE else take(sequences)
        table_changes, row_params = take(3 * changes), take(ROW_PARAMS * params)
        scores = PromptScores(take(scored), take(scored), count, []) if scored >= 0 else None
        if flags & SHARED_CHANGED:
            self._shared = SharedPrefixes(take(packed).copy(), *self._limits)
        if at != len(values):
            raise ValueError(f"a step of {at} values was sent as {len(values)}")
        return StepInput(
            rows=rows,
            starts=starts,
            lengths=lengths,
            token_ids=token_ids,
            samples=samples,
            table_changes=table_changes.reshape(3, -1),
            row_params=row_params.reshape(ROW_PARAMS, -1),
            any_filtered=not flags & PLAIN,
            prompt_scores=scores,
            shared=self._shared if flags & SHARED else None,
        )
