"""Transfers between host and device that never wait.

A queued copy reads its pinned buffer later than the host wrote it, so each step in flight owns the buffers of one
slot. A slot is taken again only after the event that its step recorded, which by then has long passed.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

NUM_SLOTS = 3  # one step running, one queued, one being prepared


@dataclass
class Slot:
    """Pinned buffers of one step in flight."""

    inputs: torch.Tensor  # int32, grows on demand
    tokens: torch.Tensor  # [max_num_seqs] int64, sampled
    done: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class PinnedStaging:
    """Ring of slots on a GPU's host side."""

    def __init__(self, device: torch.device, max_num_seqs: int, max_ints: int):
        self._device = device
        self._slots = [
            Slot(
                torch.empty(max_ints, dtype=torch.int32, pin_memory=True),
                torch.empty(max_num_seqs, dtype=torch.int64, pin_memory=True),
            )
            for _ in range(NUM_SLOTS)
        ]
        self._turn = 0
        self._used = 0

    def begin(self) -> None:
        """Take the next slot for a new step."""
        self._turn = (self._turn + 1) % NUM_SLOTS
        self._used = 0
        self._slot.done.synchronize()

    def to_device(self, arrays: tuple[np.ndarray, ...]) -> torch.Tensor:
        """All arrays as one flat int32 tensor on the device."""
        staged = self._stage(sum(array.size for array in arrays))
        np.concatenate([array.ravel() for array in arrays], out=staged.numpy(), casting="same_kind")
        return staged.to(self._device, non_blocking=True)

    def copy_into(self, array: np.ndarray, target: torch.Tensor) -> None:
        """`array` into a device tensor of the same number of elements."""
        staged = self._stage(array.size)
        staged.numpy()[:] = array.ravel()
        target.view(-1).copy_(staged, non_blocking=True)

    def fetch(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Queue the copy of sampled tokens [n] to the host; they are there once the event has passed."""
        host = self._slot.tokens[: tokens.shape[0]]
        host.copy_(tokens, non_blocking=True)
        self._slot.done.record()
        return host, self._slot.done

    @property
    def _slot(self) -> Slot:
        return self._slots[self._turn]

    def _stage(self, size: int) -> torch.Tensor:
        """A piece of the slot's input buffer that nothing of this step uses yet."""
        slot = self._slot
        if self._used + size > slot.inputs.numel():
            slot.inputs = torch.empty(2 * (self._used + size), dtype=torch.int32, pin_memory=True)
            self._used = 0  # pieces of the old buffer stay alive until torch sees their copies done
        piece = slot.inputs[self._used : self._used + size]
        self._used += size
        return piece
