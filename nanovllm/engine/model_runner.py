"""One rank: the model, its KV cache and row state, and the way of a step through them.

What may enter `launch`: work that every step needs, in time that depends on the step's size only, and
nothing that waits for the device. Values come back through `StepResult.token_ids`.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from nanovllm.config import Limits
from nanovllm.engine.draw import Drawer, Drawn
from nanovllm.engine.graph_inputs import GraphInputs
from nanovllm.engine.graph_runner import GraphKey, GraphRunner
from nanovllm.engine.prompt_scores import PromptScores, record_prompt_scores, score_hidden
from nanovllm.engine.rank_draw import RankDrawer, sample_over_ranks
from nanovllm.engine.scheduler import Logprobs
from nanovllm.engine.staging import PinnedStaging
from nanovllm.engine.step import ON_DEVICE, RowState, Step, StepInput
from nanovllm.kernels.shared_prefixes import SharedPrefixes
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.ops import Ops
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.utils.device import made_current


@dataclass(frozen=True)
class StepResult:
    """Tokens of a launched step, on their way to the host."""

    samples: np.ndarray  # [S] 1 where the step drew a token
    tokens: torch.Tensor  # [number of ones in samples] int64, on the host once `ready`
    ready: torch.cuda.Event | None  # None when there is nothing to wait for
    logprob_tensors: tuple[torch.Tensor, torch.Tensor] | None = None  # ids and values, on the device
    prompt_scores: PromptScores | None = None
    prompt_tensors: tuple[torch.Tensor, torch.Tensor] | None = None  # the same of the prompt tokens

    def token_ids(self) -> list[int]:
        """[S] token ids, 0 where nothing was drawn. Waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        drawn = self.tokens.tolist()
        if len(drawn) == len(self.samples):
            return drawn
        ids = iter(drawn)
        return [next(ids) if samples else 0 for samples in self.samples.tolist()]

    def record_prompt_scores(self) -> None:
        """Hand the prompts' log-probabilities to their sequences. Waits for the device."""
        if self.prompt_scores is not None and self.prompt_tensors is not None:
            rows = zip(*(tensor.tolist() for tensor in self.prompt_tensors), strict=True)
            record_prompt_scores(self.prompt_scores, list(rows))

    def logprobs(self) -> list[Logprobs] | None:
        """[S] log-probabilities, empty where nothing was drawn; None when nobody asked. Waits for the device."""
        if self.logprob_tensors is None:
            return None
        rows = zip(*(tensor.tolist() for tensor in self.logprob_tensors), strict=True)
        return [next(rows) if samples else ([], []) for samples in self.samples.tolist()]


class ModelRunner:
    """Runs steps.

    Args:
        model: with its weights loaded.
        ops, attention: what the model was built with.
        kv_cache: [num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim]; the last block is for padding.
        kv_scales: [num_layers, 2, num_kv_heads] float32, of a cache in float8: of keys, then of values.
        limits: rows, tokens in one step, and tokens that a row's block table has to cover.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        ops: Ops,
        attention: AttentionBackend,
        kv_cache: torch.Tensor,
        limits: Limits,
        kv_scales: torch.Tensor | None = None,
    ):
        self.model = model
        self.ops = ops
        self.attention = attention
        self.kv_cache = kv_cache
        self.kv_scales = kv_scales
        self.device = kv_cache.device
        self.block_size = kv_cache.shape[3]
        max_blocks = -(-limits.max_model_len // self.block_size)
        two_rotations = model.spec.long_rope(limits.max_model_len) is not None
        padding_block = kv_cache.shape[2] - 1
        self.rows = RowState.allocate(limits.max_num_seqs, max_blocks, padding_block, self.device, two_rotations)
        one = model.ranks.size == 1
        self._drawer = Drawer(self.rows, ops, model.spec.vocab_size) if one else RankDrawer(self.rows, ops, model)
        self._shared: SharedPrefixes[np.ndarray] | None = None  # what `attention.shared` holds
        self.graphs: GraphRunner | None = None
        self._staging: PinnedStaging | None = None
        if self.device.type == "cuda":
            ints = (
                3 * limits.max_num_batched_tokens
                + 16 * limits.max_num_seqs
                + GraphInputs.length(limits.max_graph_tokens)
            )
            self._staging = PinnedStaging(self.device, limits.max_num_seqs, ints)

    @torch.inference_mode()
    def capture_graphs(self, keys: list[GraphKey]) -> None:
        """Record steps (`graph_keys`); `launch` replays the smallest that fits a step."""
        with made_current(self.device):
            self.graphs = GraphRunner(self, keys)
            self.graphs.capture()

    def drop_graphs(self) -> None:
        """Graphs and runner refer to each other; after this, dropping the runner frees its memory at once."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.graphs = None

    @torch.inference_mode()
    def launch(self, inputs: StepInput) -> StepResult:
        """Start a step. On a GPU the work is queued on its current stream and this returns at once."""
        with made_current(self.device):
            return self._launch(inputs)

    def _launch(self, inputs: StepInput) -> StepResult:
        if self._staging is not None:
            self._staging.begin()
        if inputs.table_changes.size or inputs.row_params.size:
            self.rows.apply(*self._to_device(inputs.table_changes, inputs.row_params))
        self._send_shared(inputs.shared)
        histories = inputs.histories
        if histories is not None:
            self._drawer.start_counting(*self._to_device(*(getattr(histories, f.name) for f in fields(histories))))
        graphs = self.graphs
        if graphs is not None and graphs.fits(inputs):
            (tokens, logprobs), prompts = self._replay(inputs, graphs), None
        else:
            (tokens, logprobs), prompts = self._run_eagerly(inputs)
        host, ready = (tokens, None) if self._staging is None else self._staging.fetch(tokens)
        return StepResult(inputs.samples, host, ready, logprobs, inputs.prompt_scores, prompts)

    def close(self) -> None:
        """Give up what is not freed with the last reference."""
        self.drop_graphs()

    def sample_into(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Draw with temperature and seed alone, as a graph does; of several ranks, all draw the same."""
        model = self.model
        if model.ranks.size == 1:
            self.ops.gumbel_sample(logits, temperatures, seeds, positions, out=out)
        else:
            params = (logits, temperatures, seeds, positions)
            out.copy_(sample_over_ranks(model.ranks, self.ops, model.spec.vocab_size, *params))

    def _replay(self, inputs: StepInput, graphs: GraphRunner) -> Drawn:
        host, device = graphs.inputs_for(inputs)
        self._copy_into(host.packed, device.packed)
        if inputs.is_plain or not inputs.num_draws:
            return graphs.replay(inputs)[0], None
        # The graph draws with temperature and seed only: draw again from its logits.
        rows, positions = graphs.drawn(inputs)
        previous = self.rows.last_tokens[rows]
        _, logits = graphs.replay(inputs)
        return self._drawer.draw(logits, rows, positions, inputs, self._to_device, previous)

    def _send_shared(self, shared: SharedPrefixes[np.ndarray] | None) -> None:
        """Hand the backend what the batch shares, unless it has it from the step before."""
        if shared is None or shared is self._shared:
            return
        assert self.attention.shared is not None
        self._copy_into(shared.packed, self.attention.shared.packed)
        self._shared = shared

    def _run_eagerly(self, inputs: StepInput) -> tuple[Drawn, tuple[torch.Tensor, torch.Tensor] | None]:
        """What was drawn, and the log-probabilities of prompt tokens."""
        input_ids, step, last = self._prepare(inputs)
        scores, prompts, wanted = inputs.prompt_scores, None, last
        if scores is not None:
            places, targets = self._to_device(scores.places, scores.targets)
            wanted = torch.cat([last, places.long()])
        if scores is not None or len(last) != len(input_ids):  # the others end at the last layer's keys and values
            step = replace(step, wanted=wanted if len(wanted) else torch.zeros_like(step.positions[:1]))
        hidden = self.model(input_ids, step)
        if scores is not None:
            prompts = score_hidden(self.model, hidden[len(last) :], targets.long(), scores.count)
            hidden = hidden[: len(last)]
        if not len(last):
            return (torch.empty(0, dtype=torch.int64, device=self.device), None), prompts
        rows = step.rows
        if len(last) != len(rows):
            rows = self._to_device(inputs.rows[inputs.samples.astype(bool)])[0]
        logits = self.model.compute_logits(hidden)
        return self._drawer.draw(logits, rows.long(), step.positions[last] + 1, inputs, self._to_device), prompts

    def _prepare(self, inputs: StepInput) -> tuple[torch.Tensor, Step, torch.Tensor]:
        """(token ids [T], the step, index of each sampling sequence's last token)."""
        lengths = inputs.lengths
        cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        token_ids, positions, token_rows, rows, cu, context_lens, last = self._to_device(
            inputs.token_ids,
            inputs.positions,
            np.repeat(inputs.rows, lengths),
            inputs.rows,
            cu_seqlens,
            inputs.starts + lengths,
            inputs.last_tokens,
        )
        state = self.rows
        if (inputs.token_ids == ON_DEVICE).any():
            token_ids = torch.where(token_ids == ON_DEVICE, state.last_tokens[token_rows.long()], token_ids)
        blocks = state.block_tables[token_rows.long(), (positions // self.block_size).long()]
        step = Step(
            positions=positions.long(),
            rotary=state.rotary(positions, token_rows),
            slots=blocks * self.block_size + positions % self.block_size,
            rows=rows,
            cu_seqlens=cu,
            context_lens=context_lens,
            block_tables=state.block_tables,
            max_seqlen=int(lengths.max()),
            kv_cache=self.kv_cache,
            kv_scales=self.kv_scales,
        )
        step = replace(step, plan=self.attention.plan(inputs, rows, context_lens, step))
        return token_ids.long(), step, last.long()

    def _copy_into(self, array: np.ndarray, target: torch.Tensor) -> None:
        if self._staging is not None:
            self._staging.copy_into(array, target)
        else:
            target.view(-1).copy_(torch.from_numpy(array).view(-1))

    def _to_device(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copy int32 arrays in one transfer."""
        if self._staging is not None:
            flat = self._staging.to_device(arrays)
        else:
            flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        parts = flat.split([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
