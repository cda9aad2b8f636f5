"""Decode steps as CUDA graphs: everything from the rows' last tokens to their next ones in one launch.

A graph is recorded for some batch sizes. A batch between two of them runs in the larger one, whose surplus
slots carry the padding row: it has one token in the block that nobody owns. The graphs share one memory pool
(only one runs at a time) and are captured from large to small, so that the pool is as large as the largest needs.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.engine.step import Step
from nanovllm.kernels.reference import DecodeInputs
from nanovllm.utils.device import capture_stream

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: dense where padding would cost most, and `max_num_seqs` itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 8192, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def shared_batch_sizes(max_num_seqs: int) -> list[int]:
    """Sizes to record with a pass over shared prefixes: fewer, since few sequences have little to share."""
    sizes = [4, 8, 16, *range(32, 8192, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs] if max_num_seqs > 1 else []


class GraphRunner:
    """Recorded decode steps of one runner.

    Args:
        runner: its model, row state and KV cache are baked into the graphs by address.
        batch_sizes: in ascending order.
        shared_sizes: for batches with a pass over shared prefixes, in ascending order; may be empty.
    """

    def __init__(self, runner: "ModelRunner", batch_sizes: list[int], shared_sizes: list[int]):
        self._runner = runner
        self._sizes = {False: batch_sizes, True: shared_sizes}
        self._largest = max(batch_sizes + shared_sizes)
        device = runner.device
        # Rows and context lengths: what differs from replay to replay. Padding stands in all of it now.
        self._inputs_np = np.empty((2, self._largest), dtype=np.int32)
        self._inputs = torch.empty(2, self._largest, dtype=torch.int32, device=device)
        self._inputs[0] = runner.rows.padding_row
        self._inputs[1] = 1
        self._tokens = torch.zeros(self._largest, dtype=torch.int64, device=device)
        columns = runner.model.logit_columns
        self._logits = torch.empty(self._largest, columns, dtype=runner.model.dtype, device=device)
        self._no_prompts = torch.zeros(1, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    @property
    def _keys(self) -> list[tuple[int, bool]]:
        keys = [(size, shared) for shared, sizes in self._sizes.items() for size in sizes]
        return sorted(keys, reverse=True)

    def go_through(self, decode_inputs: Callable[..., DecodeInputs]) -> None:
        """Launch what the graphs would hold, with another way to make indices: no kernel of ours need really run."""
        for size, shared in self._keys:
            self._run(size, shared, decode_inputs)

    def capture(self) -> None:
        """Record the graphs."""
        pool, decode_inputs = None, self._runner.ops.decode_inputs
        # NCCL's watchdog is a thread that looks at events of its own all the time, which would break off the capture.
        mode = "global" if self._runner.model.ranks.size == 1 else "thread_local"
        stream = capture_stream(self._runner.device)
        for size, shared in self._keys:
            self._graphs[size, shared] = graph = torch.cuda.CUDAGraph()
            self._run(size, shared, decode_inputs)  # what is compiled or initialised must be so outside of the capture
            torch.cuda.synchronize(self._runner.device)
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                self._run(size, shared, decode_inputs)
            pool = graph.pool()

    def fits(self, num_seqs: int, shared: bool) -> bool:
        return bool(self._sizes[shared]) and num_seqs <= self._sizes[shared][-1]

    def inputs_for(self, rows: np.ndarray, context_lens: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        """(host values, device tensor to copy them into), both [2, largest batch size]."""
        n = len(rows)
        self._inputs_np[0, :n] = rows
        self._inputs_np[0, n:] = self._runner.rows.padding_row
        self._inputs_np[1, :n] = context_lens
        self._inputs_np[1, n:] = 1
        return self._inputs_np, self._inputs

    def replay(self, num_seqs: int, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the step; (tokens [num_seqs] int64, logits [num_seqs, columns]), valid until the next replay."""
        sizes = self._sizes[shared]
        self._graphs[sizes[bisect_left(sizes, num_seqs)], shared].replay()
        return self._tokens[:num_seqs], self._logits[:num_seqs]

    def _run(self, size: int, shared: bool, decode_inputs: Callable[..., DecodeInputs]) -> None:
        """What a graph holds: a decode of the rows in `_inputs`, from their last tokens to their next."""
        runner, state = self._runner, self._runner.rows
        rows, context_lens = self._inputs[0, :size], self._inputs[1, :size]
        inputs = decode_inputs(
            rows,
            context_lens,
            state.last_tokens,
            state.block_tables,
            state.temperatures,
            state.seeds,
            runner.block_size,
        )
        step = Step(
            positions=inputs.positions,
            rotary=state.rotary(inputs.positions, inputs.rows),
            slots=inputs.slots,
            rows=rows,
            cu_seqlens=self._no_prompts,
            context_lens=context_lens,
            block_tables=state.block_tables,
            max_seqlen=1,
            kv_cache=runner.kv_cache,
            kv_scales=runner.kv_scales,
            plan=runner.attention.plan_decodes(rows, context_lens, state.block_tables, shared),
        )
        logits = runner.model.compute_logits(runner.model(inputs.token_ids, step), out=self._logits[:size])
        tokens = self._tokens[:size]
        runner.sample_into(logits, inputs.temperatures, inputs.seeds, context_lens, tokens)
        state.last_tokens[inputs.rows] = tokens
