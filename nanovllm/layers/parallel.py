"""One model over several ranks: which part of a tensor a rank holds, and what ranks tell each other.

With one rank nothing here runs in a step: layers ask `Ranks.size` when they are built.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Runs:
    """Pieces (start, stop) of a dimension of `total`, in the order in which they are stored."""

    total: int
    pieces: tuple[tuple[int, int], ...]

    @staticmethod
    def joined(parts: Sequence["Runs"]) -> "Runs":
        """The same pieces where all `parts` lie one after the other in one tensor."""
        pieces: list[tuple[int, int]] = []
        total = 0
        for part in parts:
            pieces.extend((total + start, total + stop) for start, stop in part.pieces)
            total += part.total
        return Runs(total, tuple(pieces))


@dataclass(frozen=True)
class Cut:
    """What a rank takes of a checkpoint's tensor: pieces along one dimension, whole in the others."""

    shape: tuple[int, ...]  # of the tensor in the checkpoint
    dim: int
    pieces: tuple[tuple[int, int], ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part; a view where it is one piece, so that of a mapped file nothing else is read."""
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    @property
    def lies_together(self) -> bool:
        """One run of bytes in the file."""
        return self.dim == 0 and len(self.pieces) == 1


@dataclass
class Ranks:
    """This process among those that share a model, and the collectives between them.

    Args:
        rank: 0 is the caller's process.
        size: number of processes.
        group: torch's process group of all of them (gloo or NCCL); not torch's default one, of which a process can
            have only one. None with one rank, and until all ranks have loaded their weights.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def runs(self, total: int) -> Runs:
        """This rank's equal share of a dimension."""
        share = total // self.size
        assert share * self.size == total, "the spec was not checked"
        return Runs(total, ((self.rank * share, (self.rank + 1) * share),))

    def vocab(self, size: int) -> tuple[int, int]:
        """(first, end) of this rank's token ids. Shares differ by one at most, so every rank has some."""
        return self.rank * size // self.size, (self.rank + 1) * size // self.size

    def padded_vocab(self, size: int) -> int:
        """Rows that each rank stores for its share of a vocabulary: the largest share."""
        return -(-size // self.size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; the same bits on each."""
        x = x.contiguous()
        options = torch.distributed.AllreduceOptions()
        options.asyncOp = False  # NCCL: on the current stream, without events of its own
        _wait(self.group.allreduce([x], options))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape], by rank."""
        out = x.new_empty((self.size, *x.shape))
        options = torch.distributed.distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        _wait(self.group._allgather_base(out.view(-1), x.contiguous().view(-1), options))
        return out

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """On rank 0 every rank's x, elsewhere None."""
        options = torch.distributed.GatherOptions()
        options.rootRank = 0
        options.asyncOp = False
        x = x.contiguous()
        outs = [] if self.rank else [torch.empty_like(x) for _ in range(self.size)]
        _wait(self.group.gather([] if self.rank else [outs], [x], options))
        return None if self.rank else outs

    def broadcast(self, x: torch.Tensor) -> None:
        """Rank 0's x, to every rank's; contiguous."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = False
        _wait(self.group.broadcast([x], options))


def _wait(work: Any) -> None:
    """NCCL returns nothing for what it has put on the current stream."""
    if work is not None:
        work.wait()
