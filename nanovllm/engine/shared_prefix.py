"""Which decoding sequences share leading blocks, and the work list of the attention pass that reads those once.

Block tables that begin with the same blocks form a tree: a node is a run of blocks and the sequences that name it, its
children share further blocks. Only full blocks are ever shared, so every key of a shared block is visible to all.
"""

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from nanovllm.engine.scheduler import Scheduled
from nanovllm.kernels.shared_prefixes import SharedPrefixes, members_per_tile

GRAIN = 64  # keys; runs are cut at multiples of it
MIN_RUN_SAVING = 1024  # reads of keys that a run must save to be worth its tile
MIN_SAVED_BYTES = 24 * 2**20  # of KV in one layer, a step, below which an H200 is no faster with the extra pass


@dataclass(frozen=True)
class SharedRun:
    """Blocks `begin .. end` of the block tables of `members` (positions in the batch), which are the same ones."""

    begin: int
    end: int
    members: list[int]


def shared_runs(tables: Seq[list[int]], limits: Seq[int], min_saving: int) -> list[SharedRun]:
    """The tree of shared leading blocks, parents before children, without what is not worth its tile.

    Args:
        tables: block tables.
        limits: leading blocks of each that may be shared.
        min_saving: block reads that a run must save.
    """
    runs: list[SharedRun] = []
    left = [(0, list(range(len(tables))))]
    for begin, candidates in left:  # grows while it is walked
        by_block: dict[int, list[int]] = defaultdict(list)
        for i in candidates:
            if begin < limits[i]:
                by_block[tables[i][begin]].append(i)
        for members in by_block.values():
            if len(members) < 2:
                continue
            end = _common_blocks(tables, limits, members)
            if (len(members) - 1) * (end - begin) >= min_saving:
                runs.append(SharedRun(begin, end, members))
                left.append((end, members))
    return runs


def _common_blocks(tables: Seq[list[int]], limits: Seq[int], members: list[int]) -> int:
    """Leading blocks that all members have in common: those of the first and the last in lexical order."""
    low, high = min(tables[i] for i in members), max(tables[i] for i in members)
    most = min(limits[i] for i in members)
    return next((i for i in range(most) if low[i] != high[i]), most)


class SharedPrefixFinder:
    """Makes the work list of a batch; remembers it while the batch stays the same.

    Args:
        max_batch: sequences of a batch, as the kernels' workspace was laid out for.
        max_items: work items, likewise; up to `max_batch` of them for tiles, the others to split long runs.
        group: query heads that share a KV head.
        block_size: tokens of a block.
        bytes_per_token: of K and V in one layer.
        min_run_saving: reads of keys that a run of blocks must save to be used.
    """

    def __init__(
        self,
        max_batch: int,
        max_items: int,
        group: int,
        block_size: int,
        bytes_per_token: int,
        min_run_saving: int = MIN_RUN_SAVING,
    ):
        self._max_batch = max_batch
        self._max_items = max_items
        self._max_parts = SharedPrefixes.max_parts(max_batch)
        self._per_tile = members_per_tile(group)
        self._block_size = block_size
        self._min_run_saving = -(-min_run_saving // block_size)
        self._min_saved = MIN_SAVED_BYTES // bytes_per_token
        self._sequences: list[int] = []
        self._found: SharedPrefixes[np.ndarray] | None = None
        self.num_found = 0  # batches for which there was something

    def find(self, decodes: list[Scheduled]) -> SharedPrefixes[np.ndarray] | None:
        """What `decodes` share, in their order; None when it is too little to be worth a pass of its own.

        Sequences keep their shared blocks for as long as they run, so the answer is the same for the same ones.
        """
        # A preempted sequence comes back with other blocks.
        sequences = [item.seq.seq_id for item in decodes] + [item.seq.num_preemptions for item in decodes]
        if sequences != self._sequences:
            self._sequences = sequences
            tables = [item.seq.block_table for item in decodes]
            limits = [item.start // self._block_size for item in decodes]
            self._found = self._work_list(decodes, shared_runs(tables, limits, self._min_run_saving))
            self.num_found += self._found is not None
        return self._found

    def _work_list(self, decodes: list[Scheduled], runs: list[SharedRun]) -> SharedPrefixes[np.ndarray] | None:
        runs = self._affordable(runs, len(decodes))
        saved = sum((len(run.members) - 1) * (run.end - run.begin) for run in runs) * self._block_size
        if not runs or saved < self._min_saved:
            return None
        size = SharedPrefixes.size(self._max_batch, self._max_items)
        shared = SharedPrefixes(np.zeros(size, dtype=np.int32), self._max_batch, self._max_items)
        items: list[tuple[int, ...]] = []
        num_listed = 0
        for run, piece in zip(runs, self._pieces(runs), strict=True):
            row = decodes[run.members[0]].seq.row
            begin, end = run.begin * self._block_size, run.end * self._block_size
            first_part = int(shared.parts[run.members[0]])  # the same for all members: they share all that came before
            starts = range(begin, end, piece)
            for tile in range(0, len(run.members), self._per_tile):
                members = min(self._per_tile, len(run.members) - tile)
                items.extend(
                    (row, start, min(start + piece, end), first_part + i, num_listed + tile, members)
                    for i, start in enumerate(starts)
                )
            shared.members[num_listed : num_listed + len(run.members)] = run.members
            num_listed += len(run.members)
            shared.hidden[run.members] = end
            shared.parts[run.members] += len(starts)
        shared.bases[:] = np.cumsum(shared.parts) - shared.parts
        shared.count[0] = len(items)
        shared.items[: len(items)] = items
        return shared

    def _affordable(self, runs: list[SharedRun], batch: int) -> list[SharedRun]:
        """The first runs, parents before children, as far as the bounds on tiles and member lists go."""
        tiles = listed = 0
        for count, run in enumerate(runs):
            tiles += -(-len(run.members) // self._per_tile)
            listed += len(run.members)
            if tiles > batch or listed > SharedPrefixes.max_members(self._max_batch):
                return runs[:count]
        return runs

    def _pieces(self, runs: list[SharedRun]) -> list[int]:
        """Keys of one work item of each run, so that all items together fill the GPU about once."""
        lengths = [-(-(run.end - run.begin) * self._block_size // GRAIN) for run in runs]  # in grains
        tiles = [-(-len(run.members) // self._per_tile) for run in runs]
        total = sum(length * count for length, count in zip(lengths, tiles, strict=True))
        piece = -(-total // (self._max_items - self._max_batch))
        while sum(-(-n // piece) * len(run.members) for n, run in zip(lengths, runs, strict=True)) > self._max_parts:
            piece *= 2
        return [min(piece, length) * GRAIN for length in lengths]
