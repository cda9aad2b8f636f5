"""Small steps as CUDA graphs: everything from the rows' last tokens to their next ones in one launch.

To a graph, all tokens are decodes: a prompt's token is one whose id the host gives, and each of them attends to its
own context, which the tokens before it have joined when a layer comes to attention. A prompt's keys are so read again
for each of its tokens, out of the cache near the cores as long as they are few; beyond `MAX_REREAD` a step runs
eagerly, with the kernel that reads them once.

A graph is recorded for some numbers of tokens. A step between two of them runs in the larger one, whose surplus
slots carry the padding row: it has one token in the block that nobody owns. The graphs share one memory pool
(only one runs at a time) and are captured from large to small, so that the pool is as large as the largest needs.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.config import Limits
from nanovllm.engine.step import ON_DEVICE, Step, StepInput
from nanovllm.kernels.reference import DecodeInputs
from nanovllm.utils.device import capture_stream

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

# Bytes of a step's prompts' keys and values, in all layers, that their tokens may read again.
MAX_REREAD = 48 * 10**9


def graph_sizes(limits: Limits) -> list[int]:
    """Numbers of tokens to record: dense where padding would cost most, and with `max_num_seqs` itself."""
    return _sizes([1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 8192, 32)], limits)


def shared_graph_sizes(limits: Limits) -> list[int]:
    """The same with a pass over shared prefixes: fewer, since few sequences have little to share."""
    return _sizes([4, 8, 16, *range(32, 8192, 32)], limits) if limits.max_num_seqs > 1 else []


def _sizes(of_decodes: list[int], limits: Limits) -> list[int]:
    """Those, up to one token of each sequence; then, with room for prompts, in wider steps."""
    most, largest = limits.max_num_seqs, limits.max_graph_tokens
    return [*(size for size in of_decodes if size < most), *range(most, largest, 64), largest]


def max_reread(kv_cache: torch.Tensor) -> int:
    """`MAX_REREAD` in tokens."""
    return MAX_REREAD // (kv_cache[:, :, 0, 0].numel() * kv_cache.element_size())


class GraphRunner:
    """Recorded steps of one runner.

    Args:
        runner: its model, row state and KV cache are baked into the graphs by address.
        sizes: numbers of tokens, in ascending order.
        shared_sizes: for steps with a pass over shared prefixes, in ascending order; may be empty.
    """

    def __init__(self, runner: "ModelRunner", sizes: list[int], shared_sizes: list[int]):
        self._runner = runner
        self._sizes = {False: sizes, True: shared_sizes}
        self._largest = max(sizes + shared_sizes)
        device, cache = runner.device, runner.kv_cache
        self.max_reread = max_reread(cache)
        # What differs from replay to replay, of each token: its row, the length of its context, its id or `ON_DEVICE`,
        # and the row whose next token is drawn from it. Padding stands in all of it now.
        self._padding = np.array([runner.rows.padding_row, 1, ON_DEVICE, runner.rows.padding_row], dtype=np.int32)
        self._inputs_np = np.repeat(self._padding[:, None], self._largest, axis=1)
        self._inputs = torch.from_numpy(self._inputs_np).to(device)
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

    def fits(self, inputs: StepInput) -> bool:
        """Whether some graph has room for the step, and is not the slower way."""
        sizes = self._sizes[inputs.shared is not None]
        if not sizes or len(inputs.token_ids) > sizes[-1] or inputs.prompt_scores is not None:
            return False
        # A chunk's tokens but one read again what stands before them: half of the chunk, on average, and the rest.
        lengths = inputs.lengths.astype(np.int64)
        reread = (lengths - 1) * (inputs.starts + lengths // 2)
        return int(reread.sum()) <= self.max_reread

    def inputs_for(self, inputs: StepInput) -> tuple[np.ndarray, torch.Tensor]:
        """(host values, device tensor to copy them into), both [4, largest size]."""
        n = len(inputs.token_ids)
        rows, context_lens, given, drawn_for = values = self._inputs_np
        values[:, n:] = self._padding[:, None]
        rows[:n] = np.repeat(inputs.rows, inputs.lengths)
        context_lens[:n] = inputs.positions + 1
        given[:n] = inputs.token_ids
        drawn_for[:n] = self._runner.rows.padding_row
        drawn_for[inputs.last_tokens] = inputs.rows[inputs.samples.astype(bool)]
        return self._inputs_np, self._inputs

    def replay(self, num_tokens: int, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the step; (tokens [num_tokens] int64, logits [num_tokens, columns]), valid until the next replay."""
        sizes = self._sizes[shared]
        self._graphs[sizes[bisect_left(sizes, num_tokens)], shared].replay()
        return self._tokens[:num_tokens], self._logits[:num_tokens]

    def _run(self, size: int, shared: bool, decode_inputs: Callable[..., DecodeInputs]) -> None:
        """What a graph holds: a step of the tokens in `_inputs`, from their rows' last tokens to the next ones."""
        runner, state = self._runner, self._runner.rows
        rows, context_lens, given, drawn_for = self._inputs[:, :size]
        inputs = decode_inputs(
            rows,
            context_lens,
            given,
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
        state.last_tokens[drawn_for.long()] = tokens
