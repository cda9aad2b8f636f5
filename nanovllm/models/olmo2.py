"""OLMo 2: norms behind attention and MLP instead of before them, and over all query and all key heads at once."""

from typing import Any

import torch
from torch import nn

from nanovllm.engine.step import Step
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.models.decoder import MLP, Attention, Build, DecoderSpec


def olmo2_spec(hf_config: Any) -> DecoderSpec:
    bias = bool(getattr(hf_config, "attention_bias", False))
    return DecoderSpec.from_config(hf_config, qkv_bias=bias, o_bias=bias, layer_class=Olmo2Layer)


class Olmo2Attention(Attention):
    """Norms of the whole query and key rows come before heads are told apart, so not in the kernel that rotates."""

    def __init__(self, spec: DecoderSpec, layer: int, build: Build, cos_sin: torch.Tensor):
        super().__init__(spec, layer, build, cos_sin)
        self._rows = [spec.num_q_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
        where = (spec.rms_norm_eps, build.dtype, build.device, build.ops)
        self.q_norm, self.k_norm = RMSNorm(self._rows[0], *where), RMSNorm(self._rows[1], *where)
        self.norms_heads = False

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, k, v = self.qkv_proj(x).split(self._rows, dim=-1)
        return torch.cat([self.q_norm(q.contiguous()), self.k_norm(k.contiguous()), v], dim=-1)


class Olmo2Layer(nn.Module):
    def __init__(self, spec: DecoderSpec, layer: int, build: Build, cos_sin: torch.Tensor):
        super().__init__()
        norm = (spec.hidden_size, spec.rms_norm_eps, build.dtype, build.device, build.ops)
        self.self_attn = Olmo2Attention(spec, layer, build, cos_sin)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp = MLP(spec, build)
        self.post_feedforward_layernorm = RMSNorm(*norm)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer.forward`."""
        x = x if residual is None else x + residual
        attended = self.post_attention_layernorm(whole(self.self_attn(x, step, wanted), x.dtype))
        x = (x if wanted is None else x[wanted]) + attended
        return self.post_feedforward_layernorm(whole(self.mlp(x), x.dtype)), x


def whole(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A projection's output [T, out], added up where it comes in parts."""
    return x.sum(0).to(dtype) if x.dim() == 3 else x
