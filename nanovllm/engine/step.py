"""A step on its way to the device: host arrays packed in one buffer, then views of one device buffer.

`StepInput` is all that a rank needs to know about a step; ranks keep the block tables and sampling
parameters of running sequences in `RowState` and receive only changes.
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from nanovllm.engine.logit_edits import Histories, LogitEdits, build_histories, build_logit_edits
from nanovllm.engine.prompt_scores import PromptScores, build_prompt_scores
from nanovllm.engine.scheduler import Batch
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.shared_prefix import SharedPrefixFinder
from nanovllm.kernels.shared_prefixes import SharedPrefixes
from nanovllm.layers.sampler import Filters

ROW_PARAMS = 11  # int32 values that a row needs to know of its sequence
ON_DEVICE = -1  # in `token_ids`: the row's last sampled token, which is on the device already


def int32_array(values: Collection[int]) -> np.ndarray:
    """Read-only, in a fifth of the time that `np.array` takes."""
    return np.frombuffer(struct.pack(f"{len(values)}i", *values), dtype=np.int32)


@dataclass(frozen=True)
class StepInput:
    """One step as host arrays, all int32. S sequences, T tokens, U block-table changes, A rows with new parameters."""

    rows: np.ndarray  # [S]
    starts: np.ndarray  # [S] position of the first token of each sequence in this step
    lengths: np.ndarray  # [S] tokens of each sequence in this step
    token_ids: np.ndarray  # [T]
    samples: np.ndarray  # [S] 1 where the next token is drawn
    table_changes: np.ndarray  # [3, U] row, column, block
    row_params: np.ndarray  # [ROW_PARAMS, A], see `_row_params`
    any_filtered: bool = False  # some sampling row has top_k, top_p or min_p
    any_penalised: bool = False  # some sampling row has penalties
    histories: Histories | None = None  # what penalties of new rows start from
    edits: LogitEdits | None = None  # what else changes logits before the draw
    num_logprobs: int = -1  # most likely tokens to report with each drawn one; -1: report nothing
    prompt_scores: PromptScores | None = None  # prompt tokens whose log-probabilities are asked for
    shared: SharedPrefixes[np.ndarray] | None = None  # what the leading decodes share, if reading it once pays

    @property
    def is_plain(self) -> bool:
        """The draw needs temperatures and seeds only: a graph's own sampler does it."""
        return not (self.any_filtered or self.any_penalised) and self.edits is None and self.num_logprobs < 0

    @property
    def is_decode(self) -> bool:
        """Each sequence goes on from the token it sampled last: nothing but rows and lengths has to be sent."""
        return bool((self.token_ids == ON_DEVICE).all())

    @property
    def num_draws(self) -> int:
        """Tokens from which a next one is drawn."""
        return int(self.samples.sum())

    @property
    def draws_everywhere(self) -> bool:
        """From each token of the step a next one is drawn, as in a step of decodes alone."""
        return self.num_draws == len(self.token_ids)

    @property
    def positions(self) -> np.ndarray:
        """[T] of the tokens in their sequences."""
        if len(self.token_ids) == len(self.starts):
            return self.starts
        before = np.cumsum(self.lengths, dtype=np.int32) - self.lengths
        offsets = np.repeat(self.starts - before, self.lengths)
        return np.arange(len(self.token_ids), dtype=np.int32) + offsets

    @property
    def last_tokens(self) -> np.ndarray:
        """Places among the T tokens of those from which a next one is drawn, in order of the sequences."""
        return (np.cumsum(self.lengths, dtype=np.int32) - 1)[self.samples.astype(bool)]

    @property
    def num_leading_decodes(self) -> int:
        """Sequences before the first with several tokens; the scheduler puts decodes first."""
        several = np.flatnonzero(self.lengths > 1)
        return int(several[0]) if len(several) else len(self.lengths)


class StepBuilder:
    """Turns batches into `StepInput`s; remembers what the device knows of each row."""

    def __init__(
        self, max_num_seqs: int, eos_token_ids: frozenset[int], shared_prefixes: SharedPrefixFinder | None = None
    ):
        self._eos_token_ids = eos_token_ids
        self._shared_prefixes = shared_prefixes
        self._num_sent_blocks = [0] * max_num_seqs  # columns of the row's block table
        self._last_sampled = [-1] * max_num_seqs  # position of the row's last token, -1 when it sampled none yet

    def build(self, batch: Batch) -> StepInput:
        for seq in batch.admitted:
            self._num_sent_blocks[seq.row] = 0
            self._last_sampled[seq.row] = -1
        sequences, starts, lengths, samples, _ = zip(*batch.items, strict=True)
        special = not all(seq.is_plain for seq in sequences)
        return StepInput(
            rows=int32_array([seq.row for seq in sequences]),
            starts=int32_array(starts),
            lengths=int32_array(lengths),
            token_ids=self._token_ids(batch),
            samples=int32_array(samples),
            table_changes=self._table_changes(batch),
            row_params=np.array([_row_params(seq) for seq in batch.admitted], dtype=np.int32).reshape(-1, ROW_PARAMS).T,
            prompt_scores=build_prompt_scores(batch) if special else None,
            shared=self._shared(batch),
            **(self._sampling(batch) if special else {}),
        )

    def _shared(self, batch: Batch) -> SharedPrefixes[np.ndarray] | None:
        if self._shared_prefixes is None or not batch.shares_blocks:
            return None
        decodes = list(takewhile(lambda item: item.num_tokens == 1, batch.items))
        return self._shared_prefixes.find(decodes)

    def _sampling(self, batch: Batch) -> dict[str, Any]:
        """The fields that plain requests leave at their defaults."""
        sampling = [item.seq for item in batch.items if item.samples]
        counts = [p.logprobs for p in (seq.params for seq in sampling if not seq.is_plain) if p.logprobs is not None]
        return {
            "any_filtered": any(seq.is_filtered for seq in sampling),
            "any_penalised": any(seq.is_penalised for seq in sampling),
            "histories": build_histories(batch),
            "edits": build_logit_edits(batch, self._eos_token_ids),
            "num_logprobs": max(counts, default=-1),
        }

    def _token_ids(self, batch: Batch) -> np.ndarray:
        ids: list[int] = []
        last_sampled = self._last_sampled
        for seq, start, num_tokens, samples, _ in batch.items:
            row, end = seq.row, start + num_tokens
            if start == last_sampled[row]:
                ids.append(ON_DEVICE)
            else:
                ids.extend(seq.token_ids[start:end])
            if samples:
                last_sampled[row] = end
        return int32_array(ids)

    def _table_changes(self, batch: Batch) -> np.ndarray:
        changes: list[tuple[int, int, int]] = []
        for item in batch.items:
            row, table = item.seq.row, item.seq.block_table
            sent = self._num_sent_blocks[row]
            if sent != len(table):
                changes.extend((row, column, table[column]) for column in range(sent, len(table)))
                self._num_sent_blocks[row] = len(table)
        return np.array(changes, dtype=np.int32).reshape(-1, 3).T


def _row_params(seq: Sequence) -> tuple[int, ...]:
    """[ROW_PARAMS] row, bits of six float32, top_k, low and high half of the seed, the rotary offset."""
    params = seq.params
    reals = (params.temperature, params.top_p, params.min_p)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    floats = np.array([*reals, *penalties], dtype=np.float32).view(np.int32)
    seed = np.array([seq.seed], dtype=np.int64).view(np.int32)
    return seq.row, *floats.tolist(), min(params.top_k, 2**31 - 1), *seed.tolist(), seq.rotary_offset


@dataclass
class RowState:
    """Device state of the running sequences, one row each, and one row more for padding.

    The padding row's table names the block that nobody owns, so that padded rows of a graph write there.
    """

    last_tokens: torch.Tensor  # [num_rows + 1] int64
    block_tables: torch.Tensor  # [num_rows + 1, max_blocks] int32
    temperatures: torch.Tensor  # [num_rows + 1] float32
    top_ps: torch.Tensor  # [num_rows + 1] float32
    min_ps: torch.Tensor  # [num_rows + 1] float32
    top_ks: torch.Tensor  # [num_rows + 1] int32
    seeds: torch.Tensor  # [num_rows + 1] int64
    penalties: torch.Tensor  # [3, num_rows + 1] float32: repetition, presence, frequency
    rotary_offsets: torch.Tensor | None  # [num_rows + 1] int64, see `LongRope`; None: all are 0

    @classmethod
    def allocate(
        cls, num_rows: int, max_blocks: int, padding_block: int, device: torch.device, long_rope: bool = False
    ) -> "RowState":
        tables = torch.full((num_rows + 1, max_blocks), padding_block, dtype=torch.int32, device=device)
        return cls(
            last_tokens=torch.zeros(num_rows + 1, dtype=torch.int64, device=device),
            block_tables=tables,
            temperatures=torch.zeros(num_rows + 1, device=device),
            top_ps=torch.ones(num_rows + 1, device=device),
            min_ps=torch.zeros(num_rows + 1, device=device),
            top_ks=torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
            seeds=torch.zeros(num_rows + 1, dtype=torch.int64, device=device),
            penalties=torch.tensor([[1.0], [0.0], [0.0]], device=device).repeat(1, num_rows + 1),
            rotary_offsets=torch.zeros(num_rows + 1, dtype=torch.int64, device=device) if long_rope else None,
        )

    @property
    def padding_row(self) -> int:
        return self.last_tokens.shape[0] - 1

    def apply(self, table_changes: torch.Tensor, row_params: torch.Tensor) -> None:
        """Take in a step's changes: [3, U] and [ROW_PARAMS, A] int32, on the device."""
        if table_changes.numel():
            rows, columns, blocks = table_changes
            self.block_tables[rows.long(), columns.long()] = blocks
        if row_params.numel():
            rows = row_params[0].long()
            self.temperatures[rows] = row_params[1].view(torch.float32)
            self.top_ps[rows] = row_params[2].view(torch.float32)
            self.min_ps[rows] = row_params[3].view(torch.float32)
            self.penalties[:, rows] = row_params[4:7].view(torch.float32)
            self.top_ks[rows] = row_params[7]
            self.seeds[rows] = (row_params[9].long() << 32) | (row_params[8].long() & 0xFFFFFFFF)
            if self.rotary_offsets is not None:
                self.rotary_offsets[rows] = row_params[10].long()

    def rotary(self, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """`Step.rotary` of tokens at `positions` [T] in `rows` [T], both of any integer type."""
        return None if self.rotary_offsets is None else positions + self.rotary_offsets[rows.long()]

    def filters(self, rows: torch.Tensor) -> Filters:
        """Of rows [n] int64."""
        return Filters(self.temperatures[rows], self.top_ks[rows], self.top_ps[rows], self.min_ps[rows])


@dataclass(frozen=True)
class Step:
    """One step on the device: the argument that the model hands down to attention."""

    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int32, where the KV of each token goes
    rows: torch.Tensor  # [S] int32
    cu_seqlens: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32, length of each sequence after this step
    block_tables: torch.Tensor  # [num_rows + 1, max_blocks] int32, indexed by row
    max_seqlen: int  # largest number of tokens of one sequence
    kv_cache: torch.Tensor  # [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]
    rotary: torch.Tensor | None = None  # [T] int64, rows of the rotary table; None: the positions
    wanted: torch.Tensor | None = None  # [n] int64, n >= 1, tokens whose hidden states are asked for; None: all
    kv_scales: torch.Tensor | None = None  # [num_layers, 2, num_kv_heads] float32, of a cache in float8: keys, values
    plan: object = None  # what the attention backend worked out for all layers
