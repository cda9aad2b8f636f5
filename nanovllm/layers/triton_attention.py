"""The default backend on a GPU: our own Triton kernels, no package beyond torch's."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanovllm.kernels.decode_attention import paged_decode
from nanovllm.kernels.decode_plan import DecodePlan
from nanovllm.kernels.prefill_attention import paged_prefill
from nanovllm.kernels.shared_attention import shared_parts
from nanovllm.kernels.shared_prefixes import SharedPrefixes
from nanovllm.layers.graph_batch import GraphBatch, GraphPrompts
from nanovllm.layers.ops import OVERLAP_ROWS, has_dependent_launch

if TYPE_CHECKING:
    from nanovllm.engine.step import Step, StepInput


@dataclass(frozen=True)
class TritonPlan:
    """The first `num_decodes` sequences have one token each and go to the decode kernel, the rest to the other.

    The decode kernel's work lists, one a window, stay with the backend.
    """

    num_decodes: int
    cu_seqlens: torch.Tensor | None  # [num_prompts + 1] int32, counted from the first prompt's first token
    shared: SharedPrefixes[torch.Tensor] | None  # of the decodes
    prompts: GraphPrompts | None = None  # of a graph, whose tokens are all decodes, those of prompts without context


class TritonAttention:
    """Split-KV decode and varlen prefill over paged KV."""

    name = "triton"
    block_multiple = 16
    graphs = True
    graph_prompts = True

    def __init__(
        self,
        max_batch: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        windows: Collection[int | None] = (None,),
        share: bool = True,
    ):
        self._overlap_launches = has_dependent_launch(device)
        share = share and None in windows  # a window hides prefixes at different keys for each sequence
        plan = DecodePlan.create(max_batch, num_q_heads, num_kv_heads, head_dim, device, share)
        self.shared: SharedPrefixes[torch.Tensor] | None = None
        if share:
            self.shared = SharedPrefixes.allocate(max_batch, plan.shared_wave + max_batch, device)
        self._decode_plans = {window: plan.with_window(window) if window else plan for window in windows}

    def plan(self, inputs: "StepInput", rows: torch.Tensor, context_lens: torch.Tensor, step: "Step") -> TritonPlan:
        num_decodes = inputs.num_leading_decodes
        shared = self.shared if inputs.shared is not None else None
        if num_decodes:
            self._plan_decodes(rows[:num_decodes], context_lens[:num_decodes], shared)
        if num_decodes == len(rows):
            return TritonPlan(num_decodes, None, shared)
        return TritonPlan(num_decodes, step.cu_seqlens[num_decodes:] - num_decodes, shared)

    def plan_graph(self, batch: GraphBatch) -> TritonPlan:
        shared = self.shared if batch.shared else None
        self._plan_decodes(batch.rows, batch.context_lens, shared, sparse=batch.prompts is not None)
        return TritonPlan(len(batch.rows), None, shared, batch.prompts)

    def _plan_decodes(
        self,
        rows: torch.Tensor,
        context_lens: torch.Tensor,
        shared: SharedPrefixes[torch.Tensor] | None,
        sparse: bool = False,
    ) -> None:
        for window, plan in self._decode_plans.items():
            plan.update(rows, context_lens, shared if window is None else None, sparse)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        step: "Step",
        scale: float,
        window: int | None = None,
        kv_scales: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        plan = step.plan
        assert isinstance(plan, TritonPlan)
        n, prompts = plan.num_decodes, plan.prompts
        pdl = self._overlap_launches and n <= OVERLAP_ROWS
        if prompts is not None:
            out = self._decode(q, k_cache, v_cache, step, scale, window, kv_scales, softcap, None, pdl)
            where = (step.block_tables, prompts.rows, prompts.starts, prompts.context_lens)
            return paged_prefill(q, k_cache, v_cache, *where, scale, out, window, kv_scales, softcap)
        if plan.cu_seqlens is None:
            return self._decode(q, k_cache, v_cache, step, scale, window, kv_scales, softcap, None, pdl)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if n:
            self._decode(q[:n], k_cache, v_cache, step, scale, window, kv_scales, softcap, out[:n], False)
        tables, rows, context_lens = step.block_tables, step.rows[n:], step.context_lens[n:]
        where = (tables, rows, plan.cu_seqlens, context_lens)
        paged_prefill(q[n:], k_cache, v_cache, *where, scale, out[n:], window, kv_scales, softcap)
        return out

    def _decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        step: "Step",
        scale: float,
        window: int | None,
        kv_scales: torch.Tensor | None,
        softcap: float | None,
        out: torch.Tensor | None,
        pdl: bool,
    ) -> torch.Tensor:
        assert isinstance(step.plan, TritonPlan)
        decode_plan, shared = self._decode_plans[window], step.plan.shared if window is None else None
        args = (q, k_cache, v_cache, step.block_tables, scale)
        if shared is not None:
            shared_parts(*args, shared, decode_plan, pdl, kv_scales, softcap)
        sparse = step.plan.prompts is not None
        return paged_decode(*args, decode_plan, out, pdl, shared is not None, kv_scales, softcap, sparse)
