"""Who computes how many tokens in the next step.

There are no prefill and decode phases: a sequence has `num_tokens` and `num_computed_tokens`, and a step
computes some of the difference. Decode is "1 left", prefill is "many left", a chunk is "some of many".

Order within the token budget: running sequences with one token left (so that nobody who is generating
waits for a long prompt), running ones in the middle of their prompt, then waiting ones, each in order of
arrival (but `pacing` may put waiting ones in another). An admitted sequence owns the blocks of all its tokens
at once, so only decodes need new blocks later.
When there are none, the running sequence that arrived last gives its blocks up and waits again, with its
tokens. The oldest one is never preempted, and no sequence is admitted with a length limit beyond the whole
pool, so the engine always makes progress.

Steps may overlap: `schedule` for step N+1 may run before `postprocess` for step N. A sequence whose next token
depends on the value of the last one (`waits_for_tokens`) sits out step N+1 then, and goes on in step N+2.
"""

import time
from collections import deque
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import StopChecker
from nanovllm.engine.finish import finish_reason
from nanovllm.engine.grammar import Grammar
from nanovllm.engine.pacing import Pacer, longest_first, may_spread
from nanovllm.engine.sequence import Sequence, Status

Logprobs = tuple[list[int], list[float]]  # token ids and log-probabilities of one draw, the drawn token first


class Scheduled(NamedTuple):  # one is made for each sequence and step, and this is the cheapest kind to make
    """Positions `start .. start + num_tokens` of `seq` in one step; `samples` when the next token is drawn."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    epoch: int  # seq.num_preemptions at that time: blocks written under an older one are gone

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. `admitted` sequences are new to their row; `shares_blocks`: some running sequences do."""

    items: list[Scheduled]
    admitted: list[Sequence]
    shares_blocks: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    @property
    def num_decode_tokens(self) -> int:
        return sum(item.num_tokens == 1 and item.samples for item in self.items)


@dataclass(slots=True)
class Counters:
    """Totals since the engine was built."""

    steps: int = 0
    preemptions: int = 0
    computed_tokens: int = 0  # prompt tokens and decodes, recomputed ones included
    generated_tokens: int = 0
    prefix_queried_tokens: int = 0  # of sequences when they were admitted
    prefix_hit_tokens: int = 0  # of those, found in the prefix cache


class Scheduler:
    """Owns the waiting and running sequences and the block manager.

    Args:
        block_manager: the KV pool.
        max_num_seqs: sequences running at the same time (also the number of device rows).
        max_num_batched_tokens: tokens in one step, at least `max_num_seqs`.
        eos_token_ids: ids that end a sequence unless it ignores them.
        pacer: bounds the prompt tokens of steps further.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: frozenset[int],
        pacer: Pacer | None = None,
    ):
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = eos_token_ids
        self._pacer = pacer
        self.waiting: deque[Sequence] = deque()  # in order of arrival, unless they are spread
        self.running: list[Sequence] = []  # in order of arrival
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.counters = Counters()

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self) -> Batch:
        """Choose the next step's tokens and give them their blocks. Empty when nothing can run before `postprocess`."""
        num_preempted = 0
        items: list[Scheduled] = []
        in_prompt: list[Sequence] = []
        block_size = self.block_manager.block_size
        for seq in list(self.running):  # written out, since it runs for every sequence in every step
            num_tokens = len(seq.token_ids) + seq.num_pending_tokens
            start = seq.num_computed_tokens
            if num_preempted and seq.status is not Status.RUNNING:
                continue
            if start + 1 < num_tokens:
                in_prompt.append(seq)
            elif start < num_tokens < seq.max_len and not (seq.waits_for_tokens and seq.num_pending_tokens):
                if num_tokens > len(seq.block_table) * block_size:
                    num_preempted += self._make_room(seq)
                    if seq.status is not Status.RUNNING:
                        continue
                    self.block_manager.extend(seq, num_tokens)
                seq.num_computed_tokens = num_tokens
                seq.num_pending_tokens += 1
                items.append(Scheduled(seq, start, 1, True, seq.num_preemptions))
        budget = self._prompt_budget(len(items), in_prompt)
        for seq in in_prompt:
            if budget and seq.status is Status.RUNNING:
                items.append(self._take(seq, min(seq.num_uncomputed_tokens, budget)))
                budget -= items[-1].num_tokens
        # Whoever was just preempted must not be back in the same step.
        admitted = [] if num_preempted else self._admit(budget, items)
        batch = Batch(items, admitted, self.block_manager.num_shared_blocks > 0)
        if items:
            self.counters.steps += 1
            self.counters.computed_tokens += batch.num_tokens
        return batch

    def postprocess(self, batch: Batch, token_ids: list[int], logprobs: list[Logprobs] | None = None) -> list[Sequence]:
        """Take in the results of a step; return the sequences that it finished.

        Args:
            batch: a step, in the order in which steps were scheduled.
            token_ids: the token sampled for each item of `batch` (any value where it does not sample).
            logprobs: for each item, when some item asked for them.
        """
        finished: list[Sequence] = []
        now = time.perf_counter()
        block_size = self.block_manager.block_size
        for i, (item, token_id) in enumerate(zip(batch.items, token_ids, strict=True)):
            seq, start, num_tokens, samples, epoch = item
            if seq.status is Status.FINISHED:
                continue  # ended or aborted while this step was in flight: its result is dropped
            if samples:
                if logprobs is not None and seq.params.logprobs is not None:
                    ids, values = logprobs[i]
                    count = 1 + seq.params.logprobs  # the drawn token and the most likely ones
                    seq.logprobs.append(dict(zip(ids[:count], values[:count], strict=True)))
                seq.num_pending_tokens -= 1
                seq.token_ids.append(token_id)
                self.counters.generated_tokens += 1
                if not seq.first_token:
                    seq.first_token = now
            end = start + num_tokens
            if seq.num_preemptions == epoch and end // block_size > seq.num_published_blocks:
                self.block_manager.publish(seq, end)
            reason = finish_reason(seq, self.eos_token_ids) if samples else None
            if reason is not None:
                self.finish(seq, reason)
                finished.append(seq)
        return finished

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a waiting or running sequence and take back what it holds."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._release(seq)
        elif seq in self.waiting:  # not yet, if adding it was interrupted
            self.waiting.remove(seq)
        seq.finish_reason = reason
        seq.ended = time.perf_counter()
        seq.status = Status.FINISHED  # last: if this breaks off, `settle` has to end it again

    def reset(self, unfinished: list[Sequence]) -> None:
        """Start over with these sequences, in order of arrival, after a step that broke off anywhere.

        The pool and the prefix cache begin empty: nothing that the broken step may have left half done is kept
        but the known tokens.
        """
        blocks = self.block_manager
        self.block_manager = BlockManager(blocks.num_blocks, blocks.block_size, blocks.enable_prefix_caching)
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        self.running.clear()
        self.waiting.clear()
        for seq in unfinished:
            seq.num_preemptions += 1
            seq.reset_to_waiting()
            self.waiting.append(seq)

    def settle(self, seq: Sequence, stop_checker: StopChecker | None, grammar: Grammar | None) -> None:
        """Take a waiting sequence's last token in again, since the step that did may have broken off half-way.

        Args:
            stop_checker: a fresh one, if the sequence has stop strings.
            grammar: likewise.
        """
        seq.stop_checker = stop_checker
        seq.grammar = grammar
        del seq.logprobs[seq.num_completion_tokens :]
        reason = finish_reason(seq, self.eos_token_ids) if seq.num_completion_tokens else None
        if reason is not None:
            self.finish(seq, reason)

    def _prompt_budget(self, num_decodes: int, in_prompt: list[Sequence]) -> int:
        """Prompt tokens that this step may take in."""
        budget = self.max_num_batched_tokens - num_decodes
        pacer, num_rows = self._pacer, len(self._free_rows)
        if pacer is None or not (in_prompt or (self.waiting and num_rows)):
            return budget
        tokens = self._spread_tokens(pacer, num_decodes, in_prompt)
        if tokens is None:
            tokens = pacer.prompt_tokens(num_decodes, chain(in_prompt, islice(self.waiting, num_rows)))
        return budget if tokens is None else min(budget, tokens)

    def _spread_tokens(self, pacer: Pacer, num_decodes: int, in_prompt: list[Sequence]) -> int | None:
        """The same, and waiting sequences put in order, where all that there are may be put off for each other."""
        has_rows = len(self.waiting) <= len(self._free_rows)
        if not (pacer.spreads and has_rows and may_spread([*self.running, *self.waiting]) and self._all_fit()):
            return None
        waiting = longest_first(self.waiting)
        tokens = pacer.spread_tokens(num_decodes, [*in_prompt, *waiting], self.running)
        if tokens is not None:
            self.waiting = deque(waiting)
        return tokens

    def _all_fit(self) -> bool:
        """Whether there is memory for all, as long as they may become."""
        blocks = self.block_manager
        needed = sum(
            -(-seq.max_len // blocks.block_size) - len(seq.block_table) for seq in (*self.running, *self.waiting)
        )
        return needed <= blocks.num_free_blocks

    def _take(self, seq: Sequence, num_tokens: int) -> Scheduled:
        start = seq.num_computed_tokens
        seq.num_computed_tokens += num_tokens
        samples = seq.num_computed_tokens == seq.num_tokens
        seq.num_pending_tokens += samples
        return Scheduled(seq, start, num_tokens, samples, seq.num_preemptions)

    def _make_room(self, seq: Sequence) -> int:
        """Preempt from the newest on until `seq` can grow to `num_tokens`, itself in the end; return how many."""
        num_preempted = 0
        needed = self.block_manager.num_blocks_to_extend(seq, seq.num_tokens)
        while needed > self.block_manager.num_free_blocks:
            victim = self.running[-1]
            self._preempt(victim)
            num_preempted += 1
            if victim is seq:
                break
        return num_preempted

    def _preempt(self, seq: Sequence) -> None:
        assert self.running[-1] is seq
        assert len(self.running) > 1, "a length limit beyond the pool was admitted"
        self.running.pop()
        self._release(seq)
        self.counters.preemptions += 1
        seq.num_preemptions += 1
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        self.block_manager.free(seq)
        self._free_rows.append(seq.row)
        seq.row = -1

    def _admit(self, budget: int, items: list[Scheduled]) -> list[Sequence]:
        """Start waiting sequences, in order, as long as there is a row, budget and memory; add their first chunks."""
        admitted: list[Sequence] = []
        put_off: list[Sequence] = []
        being_computed: set[bytes] | None = None
        while self.waiting and self._free_rows and budget:
            seq = self.waiting[0]
            if seq.num_pending_tokens:
                break  # preempted with a token in flight: its value is needed first
            # Tokens found in the cache would have no logits.
            prefix = [] if seq.needs_prompt_scores else self.block_manager.find_prefix(seq)
            if being_computed is None:
                being_computed = {key for other in self.running for key in self._unpublished_keys(other)}
            if not seq.needs_prompt_scores and self._next_key(seq, len(prefix)) in being_computed:
                put_off.append(self.waiting.popleft())  # a running sequence is about to publish what it needs
                continue
            if not self._fits(seq, prefix):
                break
            self.waiting.popleft()
            self._start(seq, prefix)
            being_computed.update(self._unpublished_keys(seq))
            admitted.append(seq)
            items.append(self._take(seq, min(seq.num_uncomputed_tokens, budget)))
            budget -= items[-1].num_tokens
        self.waiting.extendleft(reversed(put_off))
        return admitted

    def _fits(self, seq: Sequence, prefix: list[int]) -> bool:
        blocks = self.block_manager
        reserve = blocks.num_blocks // 100 if self.running else 0  # room to grow, against thrashing
        return blocks.num_blocks_needed(seq, prefix) + reserve <= blocks.num_free_blocks

    def _start(self, seq: Sequence, prefix: list[int]) -> None:
        self.block_manager.allocate(seq, prefix)
        self.counters.prefix_queried_tokens += len(seq.token_ids)
        self.counters.prefix_hit_tokens += seq.num_computed_tokens
        if not seq.started:
            seq.started = time.perf_counter()
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.row = self._free_rows.pop()
        seq.status = Status.RUNNING
        position = len(self.running)
        while position and self.running[position - 1].seq_id > seq.seq_id:
            position -= 1  # a preempted sequence takes its old place again
        self.running.insert(position, seq)

    def _unpublished_keys(self, seq: Sequence) -> list[bytes]:
        """Chain keys of the full blocks of known tokens that a running sequence is still to publish."""
        blocks = self.block_manager
        num_full = len(seq.token_ids) // blocks.block_size
        if not blocks.enable_prefix_caching or num_full <= seq.num_published_blocks:
            return []
        return [key for key, _ in blocks.chain(seq, num_full)[seq.num_published_blocks :]]

    def _next_key(self, seq: Sequence, num_cached_blocks: int) -> bytes | None:
        blocks = self.block_manager
        if not blocks.enable_prefix_caching or num_cached_blocks == blocks.num_matchable_blocks(seq):
            return None
        return blocks.chain(seq, num_cached_blocks + 1)[num_cached_blocks][0]
