"""Small steps as CUDA graphs: everything from the rows' last tokens to their next ones in one launch.

A graph is recorded for some numbers of tokens: of decodes alone, and of decodes with some prompts' tokens behind them.
A step between two of them runs in the larger one, whose surplus slots carry the padding row: it has one token in the
block that nobody owns. Decode attention takes the prompts' tokens for sequences without context, and the prompts'
own kernel leaves the decodes out. The graphs share one memory pool (only one runs at a time) and are captured from
large to small, so that the pool is as large as the largest needs.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nanovllm.config import Limits
from nanovllm.engine.graph_inputs import MAX_PROMPTS, GraphInputs, fill
from nanovllm.engine.step import Step, StepInput
from nanovllm.kernels.reference import DecodeInputs
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.graph_batch import GraphBatch, GraphPrompts
from nanovllm.utils.device import capture_stream

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner


class GraphKey(NamedTuple):
    tokens: int
    shared: bool  # with a pass over shared prefixes
    prompts: bool  # with prompts' tokens behind the decodes


def graph_keys(limits: Limits, attention: AttentionBackend) -> list[GraphKey]:
    """The graphs to record, in ascending order."""
    most, largest, shares = limits.max_num_seqs, limits.max_graph_tokens, attention.shared is not None
    many = range(256, 8192, 64)
    dense = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *many]  # where padding would cost most
    keys = [GraphKey(size, False, False) for size in _up_to(most, dense)]
    if shares and most > 1:  # fewer, since few sequences have little to share
        keys += [GraphKey(size, True, False) for size in _up_to(most, [4, 8, 16, *range(32, 256, 32), *many])]
    if attention.graph_prompts and largest > 1:
        keys += [GraphKey(size, False, True) for size in _up_to(largest, [32, *range(128, 8192, 128)])]
        if shares and most > 1:
            keys += [GraphKey(size, True, True) for size in _up_to(largest, [*range(256, 8192, 256)])]
    return sorted(keys)


def _up_to(most: int, sizes: list[int]) -> list[int]:
    return [*(size for size in sizes if size < most), most]


class GraphRunner:
    """Recorded steps of one runner.

    Args:
        runner: its model, row state and KV cache are baked into the graphs by address.
        keys: in ascending order.
    """

    def __init__(self, runner: "ModelRunner", keys: list[GraphKey]):
        self._runner = runner
        self._keys = keys
        self._sizes: dict[tuple[bool, bool], list[int]] = defaultdict(list)
        for size, shared, prompts in keys:
            self._sizes[shared, prompts].append(size)
        largest, device = keys[-1].tokens, runner.device
        self._host = GraphInputs.padding(largest, runner.rows.padding_row)
        self._inputs = GraphInputs(torch.from_numpy(self._host.packed).to(device, copy=True), largest)
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=device)
        columns = runner.model.logit_columns
        self._logits = torch.empty(largest, columns, dtype=runner.model.dtype, device=device)
        self._no_prompts = torch.zeros(1, dtype=torch.int32, device=device)
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}

    def go_through(self, decode_inputs: Callable[..., DecodeInputs]) -> None:
        """Launch what the graphs would hold, with another way to make indices: no kernel of ours need really run."""
        for key in reversed(self._keys):
            self._run(key, decode_inputs)

    def capture(self) -> None:
        """Record the graphs."""
        pool, decode_inputs = None, self._runner.ops.decode_inputs
        # NCCL's watchdog is a thread that looks at events of its own all the time, which would break off the capture.
        mode = "global" if self._runner.model.ranks.size == 1 else "thread_local"
        stream = capture_stream(self._runner.device)
        for key in reversed(self._keys):
            self._graphs[key] = graph = torch.cuda.CUDAGraph()
            self._run(key, decode_inputs)  # what is compiled or initialised must be so outside of the capture
            torch.cuda.synchronize(self._runner.device)
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                self._run(key, decode_inputs)
            pool = graph.pool()

    def fits(self, inputs: StepInput) -> bool:
        """Whether some graph has room for the step."""
        num_prompts = len(inputs.rows) - inputs.num_leading_decodes
        sizes = self._sizes[inputs.shared is not None, num_prompts > 0]
        fit = bool(sizes) and len(inputs.token_ids) <= sizes[-1] and num_prompts <= MAX_PROMPTS
        return fit and inputs.prompt_scores is None

    def inputs_for(self, inputs: StepInput) -> tuple[GraphInputs[np.ndarray], GraphInputs[torch.Tensor]]:
        """(the step's values on the host, where on the device they have to be copied)."""
        fill(self._host, inputs, self._runner.rows.padding_row)
        return self._host, self._inputs

    def replay(self, inputs: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the step; (tokens [T] int64, logits [T, columns]), valid until the next replay."""
        n = len(inputs.token_ids)
        self._replay(self._key(inputs))
        return self._tokens[:n], self._logits[:n]

    def _key(self, inputs: StepInput) -> GraphKey:
        """The smallest graph that has room."""
        shared, prompts = inputs.shared is not None, inputs.num_leading_decodes < len(inputs.rows)
        sizes = self._sizes[shared, prompts]
        return GraphKey(sizes[bisect_left(sizes, len(inputs.token_ids))], shared, prompts)

    def _replay(self, key: GraphKey) -> None:
        self._graphs[key].replay()

    def _run(self, key: GraphKey, decode_inputs: Callable[..., DecodeInputs]) -> None:
        """What a graph holds: a step of the tokens in `_inputs`, from their rows' last tokens to the next ones."""
        runner, state = self._runner, self._runner.rows
        values, size = self._inputs, key.tokens
        rows, context_lens = values.rows[:size], values.context_lens[:size]
        prompts, decode_lens = None, context_lens
        if key.prompts:
            prompts = GraphPrompts(values.prompt_rows, values.prompt_starts, values.prompt_lens)
            decode_lens = values.decode_lens[:size]
        inputs = decode_inputs(
            rows,
            context_lens,
            values.given[:size],
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
            plan=runner.attention.plan_graph(GraphBatch(rows, decode_lens, state.block_tables, key.shared, prompts)),
        )
        logits = runner.model.compute_logits(runner.model(inputs.token_ids, step), out=self._logits[:size])
        tokens = self._tokens[:size]
        runner.sample_into(logits, inputs.temperatures, inputs.seeds, context_lens, tokens)
        state.last_tokens[values.drawn_for[:size].long()] = tokens
