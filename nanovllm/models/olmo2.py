"""OLMo 2: norms behind attention and MLP instead of before them, and over all query and all key heads at once."""

from typing import Any

import torch
from torch import nn

from nanovllm.engine.step import Step
from nanovllm.layers.layernorm import RMSNorm, ShardedNorm
from nanovllm.layers.parallel import Runs
from nanovllm.models.decoder import MLP, Attention, Build, DecoderSpec, kv_runs, make_norm, query_runs


def olmo2_spec(hf_config: Any, **switches: Any) -> DecoderSpec:
    """`switches` are further fields of the spec, for families of the same layers."""
    bias = bool(getattr(hf_config, "attention_bias", False))
    own = {"qkv_bias": bias, "o_bias": bias, "float32_norms": True, "layer_class": Olmo2Layer}
    return DecoderSpec.from_config(hf_config, **own, **switches)


class Olmo2Attention(Attention):
    """Norms of the whole query and key rows come before heads are told apart, so not in the kernel that rotates."""

    def __init__(self, spec: DecoderSpec, layer: int, build: Build, cos_sin: torch.Tensor):
        super().__init__(spec, layer, build, cos_sin)
        self._rows = [spec.num_q_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
        if build.ranks.size > 1:
            self._shard_norms(spec, build)
        else:
            self.q_norm, self.k_norm = (make_norm(spec, rows, build) for rows in self._rows[:2])
        self.norms_heads = False

    def _shard_norms(self, spec: DecoderSpec, build: Build) -> None:
        def norm(runs: Runs) -> ShardedNorm:
            return ShardedNorm(runs, spec.rms_norm_eps, torch.float32, build.device, build.ops)

        self.q_norm, self.k_norm = norm(query_runs(spec, build.ranks)), norm(kv_runs(spec, build.ranks))
        assert spec.total_kv_heads is not None
        self._kv_copies = spec.num_kv_heads * build.ranks.size // spec.total_kv_heads

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).split(self._rows, dim=-1)
        if isinstance(self.q_norm, ShardedNorm) and isinstance(self.k_norm, ShardedNorm):
            squares = self._build.ranks.all_reduce(torch.stack([y.float().square().sum(-1) for y in (q, k)]))
            q, k = self.q_norm.scaled(q, squares[0]), self.k_norm.scaled(k, squares[1] / self._kv_copies)
            return torch.cat([q, k, v], dim=-1)
        assert isinstance(self.q_norm, RMSNorm)
        assert isinstance(self.k_norm, RMSNorm)
        return torch.cat([self.q_norm(q.contiguous()), self.k_norm(k.contiguous()), v], dim=-1)


class Olmo2Layer(nn.Module):
    def __init__(self, spec: DecoderSpec, layer: int, build: Build, cos_sin: torch.Tensor):
        super().__init__()
        self.self_attn = Olmo2Attention(spec, layer, build, cos_sin)
        self.post_attention_layernorm = make_norm(spec, spec.hidden_size, build)
        self.mlp = MLP(spec, build)
        self.post_feedforward_layernorm = make_norm(spec, spec.hidden_size, build)

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
