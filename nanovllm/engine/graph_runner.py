"""Small steps as CUDA graphs: everything from the rows' last tokens to their next ones in one launch.

A graph is recorded for some numbers of tokens: of decodes alone, and of decodes with some prompts' tokens behind them.
A step between two of them runs in the larger one, whose surplus slots carry the padding row: it has one token in the
block that nobody owns. Decode attention takes the prompts' tokens for sequences without context, and the prompts'
own kernel leaves the decodes out; logits are made of the tokens alone from which something is drawn, for some bound on
their number. The graphs share one memory pool (only one runs at a time) and are captured from large to small, so that
the pool is as large as the largest needs.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nanovllm.config import Limits
from nanovllm.engine.few_layers import few_layers
from nanovllm.engine.graph_inputs import MAX_PROMPTS, GraphInputs, fill
from nanovllm.engine.step import Step, StepInput
from nanovllm.kernels.reference import DecodeInputs
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.graph_batch import GraphBatch, GraphPrompts
from nanovllm.utils.device import capture_stream

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner


DRAWS_TILE = 128  # rows of logits that cost about as much as one


class GraphKey(NamedTuple):
    tokens: int
    draws: int  # tokens from which a next one may be drawn
    shared: bool  # with a pass over shared prefixes
    prompts: bool  # with tokens from which nothing is drawn behind the decodes


def graph_keys(limits: Limits, attention: AttentionBackend) -> list[GraphKey]:
    """The graphs to record, in ascending order."""
    most, largest, shares = limits.max_num_seqs, limits.max_graph_tokens, attention.shared is not None
    many = range(256, 8192, 64)
    dense = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *many]  # where padding would cost most
    keys = [GraphKey(size, size, False, False) for size in _up_to(most, dense)]
    if shares and most > 1:  # fewer, since few sequences have little to share
        sizes = _up_to(most, [4, 8, 16, *range(32, 256, 32), *many])
        keys += [GraphKey(size, size, True, False) for size in sizes]
    if attention.graph_prompts and largest > 1:
        for size in _up_to(largest, [32, *range(128, 8192, 128)]):
            few = -(-size // 2 // DRAWS_TILE) * DRAWS_TILE
            keys += [GraphKey(size, draws, False, True) for draws in _up_to(min(size, most), [few])]
        if shares and most > 1:
            sizes = _up_to(largest, [*range(256, 8192, 256)])
            keys += [GraphKey(size, min(size, most), True, True) for size in sizes]
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
        self._kinds: dict[tuple[bool, bool], list[GraphKey]] = defaultdict(list)
        for key in keys:
            self._kinds[key.shared, key.prompts].append(key)
        largest, device = keys[-1].tokens, runner.device
        self._host = GraphInputs.padding(largest, runner.rows.padding_row)
        self._inputs = GraphInputs(torch.from_numpy(self._host.packed).to(device, copy=True), largest)
        draws, columns = max(key.draws for key in keys), runner.model.logit_columns
        self._tokens = torch.zeros(draws, dtype=torch.int64, device=device)
        self._logits = torch.empty(draws, columns, dtype=runner.model.dtype, device=device)
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
            with few_layers(self._runner.model):  # what is compiled or loaded must be so outside of the capture
                self._run(key, decode_inputs)
            torch.cuda.synchronize(self._runner.device)
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                self._run(key, decode_inputs)
            pool = graph.pool()

    def fits(self, inputs: StepInput) -> bool:
        """Whether some graph has room for the step."""
        num_prompts = len(inputs.rows) - inputs.num_leading_decodes
        return num_prompts <= MAX_PROMPTS and inputs.prompt_scores is None and self._key(inputs) is not None

    def inputs_for(self, inputs: StepInput) -> tuple[GraphInputs[np.ndarray], GraphInputs[torch.Tensor]]:
        """(the step's values on the host, where on the device they have to be copied)."""
        fill(self._host, inputs, self._runner.rows.padding_row)
        return self._host, self._inputs

    def drawn(self, inputs: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, positions of the drawn tokens) of a step whose values are on the device, both [draws] int64."""
        n, values = inputs.num_draws, self._inputs
        if inputs.draws_everywhere:
            return values.rows[:n].long(), values.context_lens[:n].long()
        return values.drawn_for[:n].long(), values.context_lens[values.drawn_from[:n].long()].long()

    def replay(self, inputs: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the step; (tokens [draws] int64, logits [draws, columns]), valid until the next replay."""
        key = self._key(inputs)
        assert key is not None  # `fits` has been asked
        self._replay(key)
        return self._tokens[: inputs.num_draws], self._logits[: inputs.num_draws]

    def _key(self, inputs: StepInput) -> GraphKey | None:
        """The smallest graph that has room, if there is one."""
        tokens, draws = len(inputs.token_ids), inputs.num_draws
        kind = self._kinds[inputs.shared is not None, not inputs.draws_everywhere]
        return next((key for key in kind if key.tokens >= tokens and key.draws >= draws), None)

    def _replay(self, key: GraphKey) -> None:
        self._graphs[key].replay()

    def _run(self, key: GraphKey, decode_inputs: Callable[..., DecodeInputs]) -> None:
        """What a graph holds: a step of the tokens in `_inputs`, from their rows' last tokens to the next ones."""
        runner, state = self._runner, self._runner.rows
        values, size = self._inputs, key.tokens
        rows, context_lens = values.rows[:size], values.context_lens[:size]
        prompts, decode_lens, wanted = None, context_lens, None
        if key.prompts:
            prompts = GraphPrompts(values.prompt_rows, values.prompt_starts, values.prompt_lens)
            decode_lens, wanted = values.decode_lens[:size], values.drawn_from[: key.draws].long()
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
            wanted=wanted,
            kv_cache=runner.kv_cache,
            kv_scales=runner.kv_scales,
            plan=runner.attention.plan_graph(GraphBatch(rows, decode_lens, state.block_tables, key.shared, prompts)),
        )
        hidden, tokens = runner.model(inputs.token_ids, step), self._tokens[: key.draws]
        logits = runner.model.compute_logits(hidden, out=self._logits[: key.draws])
        if wanted is None:
            drawn_for, temperatures, seeds, drawn_at = inputs.rows, inputs.temperatures, inputs.seeds, context_lens
        else:
            drawn_for, drawn_at = values.drawn_for[: key.draws].long(), context_lens[wanted]
            temperatures, seeds = state.temperatures[drawn_for], state.seeds[drawn_for]
        runner.sample_into(logits, temperatures, seeds, drawn_at, tokens)
        state.last_tokens[drawn_for] = tokens
