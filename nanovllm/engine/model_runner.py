"""One rank: the model, its KV cache and row state, and the way of a step through them.

What may enter `launch`: work that every step needs, in time that depends on the step's size only, and
nothing that waits for the device. Values come back through `StepResult.token_ids`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanovllm.engine.step import ON_DEVICE, RowState, Step, StepInput
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.ops import Ops
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import DecoderForCausalLM


@dataclass(frozen=True)
class StepResult:
    """Tokens of a launched step, on their way to the host."""

    samples: np.ndarray  # [S] 1 where the step drew a token
    tokens: torch.Tensor  # [number of ones in samples] int64, on the host once `ready`
    ready: Any = None  # event that the copy to the host records, None when there is nothing to wait for

    def token_ids(self) -> list[int]:
        """[S] token ids, 0 where nothing was drawn. Waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        drawn = iter(self.tokens.tolist())
        return [next(drawn) if samples else 0 for samples in self.samples.tolist()]


class ModelRunner:
    """Runs steps.

    Args:
        model: with its weights loaded.
        ops, attention: what the model was built with.
        kv_cache: [num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim]; the last block is for padding.
        max_num_seqs: number of rows.
        max_model_len: tokens that a row's block table has to cover.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        ops: Ops,
        attention: AttentionBackend,
        kv_cache: torch.Tensor,
        max_num_seqs: int,
        max_model_len: int,
    ):
        self.model = model
        self.ops = ops
        self.attention = attention
        self.kv_cache = kv_cache
        self.device = kv_cache.device
        self.block_size = kv_cache.shape[3]
        max_blocks = -(-max_model_len // self.block_size)
        self.rows = RowState.allocate(max_num_seqs, max_blocks, kv_cache.shape[2] - 1, self.device)

    @torch.inference_mode()
    def launch(self, inputs: StepInput) -> StepResult:
        """Start a step. On a GPU the work is queued on the current stream and this returns at once."""
        table_changes, row_params = self._to_device(inputs.table_changes, inputs.row_params)
        self.rows.apply(table_changes, row_params)
        input_ids, step, last = self._prepare(inputs)
        hidden = self.model(input_ids, step)
        tokens = self._sample(hidden, inputs, step, last)
        return StepResult(inputs.samples, tokens)

    def _prepare(self, inputs: StepInput) -> tuple[torch.Tensor, Step, torch.Tensor]:
        """(token ids [T], the step, index of each sampling sequence's last token)."""
        lengths = inputs.lengths
        cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        token_rows_np = np.repeat(inputs.rows, lengths)
        positions_np = np.arange(len(inputs.token_ids), dtype=np.int32) + np.repeat(
            inputs.starts - cu_seqlens[:-1], lengths
        )
        sampling = np.flatnonzero(inputs.samples)
        token_ids, positions, token_rows, rows, cu, context_lens, last = self._to_device(
            inputs.token_ids,
            positions_np,
            token_rows_np,
            inputs.rows,
            cu_seqlens,
            inputs.starts + lengths,
            cu_seqlens[sampling + 1] - 1,
        )
        state = self.rows
        if (inputs.token_ids == ON_DEVICE).any():
            input_ids = torch.where(token_ids == ON_DEVICE, state.last_tokens[token_rows.long()], token_ids)
        else:
            input_ids = token_ids.long()
        blocks = state.block_tables[token_rows.long(), (positions // self.block_size).long()]
        step = Step(
            positions=positions.long(),
            slots=blocks * self.block_size + positions % self.block_size,
            rows=rows,
            cu_seqlens=cu,
            context_lens=context_lens,
            block_tables=state.block_tables,
            max_seqlen=int(lengths.max()),
            kv_cache=self.kv_cache,
            plan=self.attention.plan(inputs, state.block_tables, self.block_size, self.kv_cache.dtype),
        )
        return input_ids, step, last

    def _sample(self, hidden: torch.Tensor, inputs: StepInput, step: Step, last: torch.Tensor) -> torch.Tensor:
        if not len(last):
            return torch.empty(0, dtype=torch.int64)
        last = last.long()
        if len(last) != len(hidden):
            hidden = hidden[last]  # the head only sees rows that sample
        rows = step.rows.long() if bool(inputs.samples.all()) else self._sampling_rows(inputs)
        state = self.rows
        tokens = sample(
            self.ops,
            self.model.compute_logits(hidden),
            state.temperatures[rows],
            state.top_ps[rows] if inputs.any_filtered else None,
            state.seeds[rows],
            step.positions[last] + 1,
        )
        state.last_tokens[rows] = tokens
        return tokens

    def _sampling_rows(self, inputs: StepInput) -> torch.Tensor:
        return self._to_device(inputs.rows[inputs.samples.astype(bool)])[0].long()

    def _to_device(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copy int32 arrays in one transfer."""
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int32))
        sizes = [array.size for array in arrays]
        parts = flat.to(self.device).split(sizes)
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
