"""Which keys the sequences of a batch share: what the host tells the kernels of decode attention."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

ITEM_FIELDS = 6  # int32s of a work item: table row, first and end key, number of the part, first member, members
TILE_ROWS = 64  # (sequence, query head) pairs of a tile

Array = TypeVar("Array", np.ndarray, torch.Tensor)


def members_per_tile(group: int) -> int:
    """Sequences whose `group` query heads of one KV head share a tile."""
    return max(TILE_ROWS // group, 1)


@dataclass(frozen=True)
class SharedPrefixes(Generic[Array]):
    """Who shares what, in one packed int32 array that is the same on host and device.

    Args:
        packed: [size(max_batch, max_items)].
        max_batch: sequences of a batch.
        max_items: work items.
    """

    packed: Array
    max_batch: int
    max_items: int

    @staticmethod
    def size(max_batch: int, max_items: int) -> int:
        return 4 + 3 * max_batch + max_items * ITEM_FIELDS + SharedPrefixes.max_members(max_batch)

    @staticmethod
    def max_members(max_batch: int) -> int:
        """Bound on the places in the member lists: a sequence may be in several items, one after the other."""
        return 4 * max_batch

    @staticmethod
    def max_parts(max_batch: int) -> int:
        """Bound on the parts that the first pass leaves."""
        return 4 * max_batch

    @classmethod
    def allocate(cls, max_batch: int, max_items: int, device: torch.device) -> "SharedPrefixes[torch.Tensor]":
        """On the device, nothing shared."""
        packed = torch.zeros(SharedPrefixes.size(max_batch, max_items), dtype=torch.int32, device=device)
        return SharedPrefixes(packed, max_batch, max_items)

    @property
    def count(self) -> Array:
        """[1] work items in use."""
        return self.packed[:1]

    @property
    def hidden(self) -> Array:
        """[max_batch] leading keys of each sequence that the first pass reads."""
        return self.packed[4 : 4 + self.max_batch]

    @property
    def bases(self) -> Array:
        """[max_batch] where each sequence's parts begin in the workspace."""
        return self.packed[4 + self.max_batch : 4 + 2 * self.max_batch]

    @property
    def parts(self) -> Array:
        """[max_batch] parts of each sequence."""
        return self.packed[4 + 2 * self.max_batch : 4 + 3 * self.max_batch]

    @property
    def items(self) -> Array:
        """[max_items, ITEM_FIELDS]"""
        start = 4 + 3 * self.max_batch
        return self.packed[start : start + self.max_items * ITEM_FIELDS].reshape(-1, ITEM_FIELDS)

    @property
    def members(self) -> Array:
        """[max_members] positions in the batch, item by item (items of the same sequences share theirs)."""
        return self.packed[4 + 3 * self.max_batch + self.max_items * ITEM_FIELDS :]
