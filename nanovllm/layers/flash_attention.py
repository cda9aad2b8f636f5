"""Backend on the optional `flash-attn` package (FlashAttention-2 and whatever offers its two functions)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.kernels.shared_prefixes import SharedPrefixes
from nanovllm.layers.graph_batch import GraphBatch

if TYPE_CHECKING:
    from nanovllm.engine.step import Step, StepInput


@dataclass(frozen=True)
class FlashPlan:
    """Decodes first, as in the step; the rest as one varlen call."""

    num_decodes: int
    block_tables: torch.Tensor  # [num_seqs, max_blocks], gathered by row
    context_lens: torch.Tensor  # [num_seqs] int32
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_k: int


class FlashAttention:
    """Raises ValueError when the package is not there or does not fit the model."""

    name = "flash_attn"
    block_multiple = 256
    graphs = True
    graph_prompts = False
    shared: SharedPrefixes[torch.Tensor] | None = None

    def __init__(self, dtype: torch.dtype, head_dim: int):
        try:
            import flash_attn
        except ImportError as error:
            raise ValueError(
                "attention_backend 'flash_attn' needs the package flash-attn (pip install nano-vllm[flash-attn]); "
                f"importing it failed: {error}. The backend 'triton' needs no package"
            ) from error
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"attention_backend 'flash_attn' computes in float16 or bfloat16, not {dtype}")
        if head_dim > 256 or head_dim % 8:
            raise ValueError(f"attention_backend 'flash_attn' takes head sizes of 8 to 256 by 8, not {head_dim}")
        self._flash = flash_attn

    def plan(self, inputs: "StepInput", rows: torch.Tensor, context_lens: torch.Tensor, step: "Step") -> FlashPlan:
        n = inputs.num_leading_decodes
        host_lens = inputs.starts + inputs.lengths
        tables = step.block_tables[rows.long()]
        if n == len(rows):
            return FlashPlan(n, tables, context_lens, None, None, 0)
        cu_k = torch.zeros(len(rows) - n + 1, dtype=torch.int32, device=rows.device)
        torch.cumsum(context_lens[n:], 0, dtype=torch.int32, out=cu_k[1:])
        return FlashPlan(n, tables, context_lens, step.cu_seqlens[n:] - n, cu_k, int(host_lens[n:].max()))

    def plan_graph(self, batch: GraphBatch) -> FlashPlan:
        assert not batch.shared
        assert batch.prompts is None
        return FlashPlan(len(batch.rows), batch.block_tables[batch.rows.long()], batch.context_lens, None, None, 0)

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
        assert kv_scales is None  # a cache in float8 has been refused
        assert isinstance(plan, FlashPlan)
        n = plan.num_decodes
        options: dict[str, Any] = {}
        if window is not None:
            options["window_size"] = (window - 1, 0)  # keys before and after the query's own
        if softcap is not None:
            options["softcap"] = softcap
        parts = []
        if n:
            decoded = self._flash.flash_attn_with_kvcache(
                q[:n].unsqueeze(1),
                k_cache,
                v_cache,
                cache_seqlens=plan.context_lens[:n],
                block_table=plan.block_tables[:n],
                softmax_scale=scale,
                causal=True,
                **options,
            )
            parts.append(decoded.squeeze(1))
        if plan.cu_seqlens_q is not None:
            parts.append(
                self._flash.flash_attn_varlen_func(
                    q[n:],
                    k_cache,
                    v_cache,
                    max_seqlen_q=step.max_seqlen,
                    cu_seqlens_q=plan.cu_seqlens_q,
                    max_seqlen_k=plan.max_seqlen_k,
                    cu_seqlens_k=plan.cu_seqlens_k,
                    softmax_scale=scale,
                    causal=True,
                    **options,
                    block_table=plan.block_tables[n:],
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
