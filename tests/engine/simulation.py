"""A model of the device for scheduler tests: KV is the tokens themselves, so any mix-up of blocks shows.

`Device.run` writes each scheduled token into its slot, then reads the whole context of every sampling sequence
back through the device's copy of the block table and demands that it is exactly the sequence's text. The next
token is a hash of that text, so completions can be compared across schedules.
"""

import zlib
from collections.abc import Callable

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Batch, Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.shared_prefix import SharedPrefixFinder
from nanovllm.engine.step import ON_DEVICE, StepBuilder, StepInput
from nanovllm.sampling_params import SamplingParams

VOCAB = 50
EOS = 7


def next_token(text: list[int]) -> int:
    return zlib.crc32(np.asarray(text, dtype=np.int32).tobytes()) % VOCAB


def expected_completion(prompt: list[int], max_len: int, ignore_eos: bool) -> list[int]:
    text = list(prompt)
    while len(text) < max_len:
        text.append(next_token(text))
        if text[-1] == EOS and not ignore_eos:
            break
    return text[len(prompt) :]


class Device:
    def __init__(self, scheduler: Scheduler):
        blocks = scheduler.block_manager
        self.block_size = blocks.block_size
        self.kv = np.full((blocks.num_blocks, blocks.block_size), -1)
        self.tables = np.full((scheduler.max_num_seqs, blocks.num_blocks), -1)
        self.last_tokens = np.full(scheduler.max_num_seqs, -1)
        self.num_tokens_run = 0
        self.num_shared_steps = 0

    def run(self, inputs: StepInput) -> list[int]:
        rows, columns, changed = inputs.table_changes
        self.tables[rows, columns] = changed
        self._check_shared(inputs)
        token_ids = iter(inputs.token_ids.tolist())
        work = list(zip(inputs.rows, inputs.starts, inputs.lengths, inputs.samples, strict=True))
        for row, start, length, _ in work:
            for position in range(start, start + length):
                token = next(token_ids)
                token = self.last_tokens[row] if token == ON_DEVICE else token
                self.kv[self.tables[row, position // self.block_size], position % self.block_size] = token
            self.num_tokens_run += length
        return [self._sample(row, start + length) if samples else -1 for row, start, length, samples in work]

    def _check_shared(self, inputs: StepInput) -> None:
        """Each member of a work item names the item's blocks; its items cover its hidden keys, each exactly once."""
        shared = inputs.shared
        if shared is None:
            return
        seen: dict[int, list[tuple[int, int, int]]] = {}
        for row, begin, end, part, first, count in shared.items[: shared.count[0]].tolist():
            assert 1 <= count <= 4, "more query heads than a tile has rows"
            blocks = slice(begin // self.block_size, -(-end // self.block_size))
            for member in shared.members[first : first + count].tolist():
                assert (self.tables[inputs.rows[member], blocks] == self.tables[row, blocks]).all()
                seen.setdefault(member, []).append((begin, end, part))
        places = []
        for member, hidden in enumerate(shared.hidden.tolist()):
            runs = sorted(seen.pop(member, []))
            assert [part for _, _, part in runs] == list(range(shared.parts[member]))
            assert [begin for begin, _, _ in runs] + [hidden] == [0] + [end for _, end, _ in runs]
            assert hidden == 0 or hidden <= inputs.starts[member], "a key of its own is left for each"
            places += range(shared.bases[member], shared.bases[member] + shared.parts[member])
        assert not seen
        assert len(set(places)) == len(places)
        assert max(places) < shared.max_parts(shared.max_batch)
        assert shared.count[0] <= len(inputs.rows) + shared.max_items - shared.max_batch
        self.num_shared_steps += 1

    def _sample(self, row: int, length: int) -> int:
        blocks = self.tables[row, : -(-length // self.block_size)]
        self.last_tokens[row] = next_token(self.kv[blocks].ravel()[:length].tolist())
        return int(self.last_tokens[row])


class Simulation:
    """Scheduler, step builder and device; `delay` steps stay in flight before their results reach the scheduler."""

    def __init__(self, num_blocks, block_size, max_num_seqs, max_tokens, caching=True, delay=0, pacer=None):
        blocks = BlockManager(num_blocks, block_size, caching)
        self.scheduler = Scheduler(blocks, max_num_seqs, max_tokens, frozenset({EOS}), pacer)
        finder = SharedPrefixFinder(max_num_seqs, max_num_seqs + 3, 16, block_size, 2**40, min_run_saving=1)
        self.builder = StepBuilder(max_num_seqs, frozenset({EOS}), finder)
        self.device = Device(self.scheduler)
        self.delay = delay
        self.in_flight: list[tuple[Batch, list[int]]] = []
        self.sequences: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.batches: list[Batch] = []

    def add(self, prompt: list[int], max_tokens: int, ignore_eos: bool = True, batch: int | None = None) -> Sequence:
        blocks = self.scheduler.block_manager
        max_len = min(len(prompt) + max_tokens, blocks.num_blocks * blocks.block_size + 1)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        seq = Sequence(len(self.sequences), prompt, params, max_len, seed=0)
        seq.batch = batch
        self.sequences.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self) -> Batch:
        scheduler = self.scheduler
        batch = scheduler.schedule()
        self.check(batch)
        self.batches.append(batch)
        if batch.items:
            self.in_flight.append((batch, self.device.run(self.builder.build(batch))))
        if len(self.in_flight) > self.delay or not batch.items:
            assert self.in_flight, "nothing scheduled and nothing in flight: no progress"
            self.finished += scheduler.postprocess(*self.in_flight.pop(0))
        return batch

    def run(self, max_steps: int, each_step: Callable[[], None] = lambda: None) -> None:
        steps = 0
        while not self.scheduler.is_finished():
            self.step()
            each_step()
            steps += 1
            assert steps <= max_steps, "more steps than there can be"
        while self.in_flight:  # results of sequences that ended meanwhile
            self.finished += self.scheduler.postprocess(*self.in_flight.pop(0))

    def check(self, batch: Batch) -> None:
        scheduler = self.scheduler
        scheduler.block_manager.check_integrity(self.sequences)
        assert batch.num_tokens <= scheduler.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert len({item.seq.seq_id for item in batch.items}) == len(batch.items)
        rows = [seq.row for seq in scheduler.running]
        assert len(set(rows)) == len(rows)
        assert [seq.seq_id for seq in scheduler.running] == sorted(seq.seq_id for seq in scheduler.running)
        for item in batch.items:
            assert item.num_tokens >= 1
            assert item.seq.status is Status.RUNNING
            assert item.seq.num_tokens <= item.seq.max_len
