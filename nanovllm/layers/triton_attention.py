"""The default backend on a GPU: our own Triton kernels, no package beyond torch's."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanovllm.kernels.decode_attention import paged_decode
from nanovllm.kernels.decode_plan import DecodePlan
from nanovllm.kernels.prefill_attention import paged_prefill
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


class TritonAttention:
    """Split-KV decode and varlen prefill over paged KV."""

    name = "triton"
    block_multiple = 16
    graphs = True

    def __init__(
        self,
        max_num_seqs: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        windows: Collection[int | None] = (None,),
    ):
        self._overlap_launches = has_dependent_launch(device)
        plan = DecodePlan.create(max_num_seqs, num_q_heads, num_kv_heads, head_dim, device)
        self._decode_plans = {window: plan.with_window(window) if window else plan for window in windows}

    def plan(self, inputs: "StepInput", rows: torch.Tensor, context_lens: torch.Tensor, step: "Step") -> TritonPlan:
        num_decodes = inputs.num_leading_decodes
        if num_decodes:
            self._plan_decodes(rows[:num_decodes], context_lens[:num_decodes])
        if num_decodes == len(rows):
            return TritonPlan(num_decodes, None)
        return TritonPlan(num_decodes, step.cu_seqlens[num_decodes:] - num_decodes)

    def plan_decodes(self, rows: torch.Tensor, context_lens: torch.Tensor, block_tables: torch.Tensor) -> TritonPlan:
        self._plan_decodes(rows, context_lens)
        return TritonPlan(len(rows), None)

    def _plan_decodes(self, rows: torch.Tensor, context_lens: torch.Tensor) -> None:
        for plan in self._decode_plans.values():
            plan.update(rows, context_lens)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        step: "Step",
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        plan, decode_plan = step.plan, self._decode_plans[window]
        assert isinstance(plan, TritonPlan)
        n = plan.num_decodes
        if plan.cu_seqlens is None:
            pdl = self._overlap_launches and n <= OVERLAP_ROWS
            return paged_decode(q, k_cache, v_cache, step.block_tables, scale, decode_plan, pdl=pdl)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if n:
            paged_decode(q[:n], k_cache, v_cache, step.block_tables, scale, decode_plan, out[:n])
        tables, rows, context_lens = step.block_tables, step.rows[n:], step.context_lens[n:]
        paged_prefill(q[n:], k_cache, v_cache, tables, rows, plan.cu_seqlens, context_lens, scale, out[n:], window)
        return out
