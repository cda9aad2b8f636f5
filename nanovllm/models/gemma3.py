"""Gemma 3 (text): norms on both sides of attention and MLP, local layers with a window and a rotation of their own."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.engine.step import Step
from nanovllm.layers.rotary_embedding import rope_settings
from nanovllm.models.decoder import MLP, Attention, Build, DecoderSpec, make_norm
from nanovllm.models.olmo2 import whole
from nanovllm.models.windows import layer_windows


def gemma3_spec(hf_config: Any) -> DecoderSpec:
    """Raises ValueError: an activation or bidirectional attention that the released models do not have, a bad cap."""
    if hf_config.hidden_activation != "gelu_pytorch_tanh":
        raise ValueError(
            f"hidden_activation {hf_config.hidden_activation!r} is not supported, only 'gelu_pytorch_tanh'"
        )
    if getattr(hf_config, "use_bidirectional_attention", False):
        raise ValueError("use_bidirectional_attention in the model's config is not supported")
    bias = bool(getattr(hf_config, "attention_bias", False))
    return DecoderSpec.from_config(
        hf_config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=layer_windows(hf_config),
        layer_class=Gemma3Layer,
        norm_offset=1.0,
        float32_norms=True,
        scale=_positive(hf_config, "query_pre_attn_scalar") ** -0.5,
        embedding_scale=hf_config.hidden_size**0.5,
        rope=rope_settings(hf_config, "full_attention"),
        window_rope=rope_settings(hf_config, "sliding_attention"),
        attn_logit_softcapping=_cap(hf_config, "attn_logit_softcapping"),
        final_logit_softcapping=_cap(hf_config, "final_logit_softcapping"),
    )


def _cap(hf_config: Any, name: str) -> float | None:
    return None if getattr(hf_config, name, None) is None else _positive(hf_config, name)


def _positive(hf_config: Any, name: str) -> float:
    value = getattr(hf_config, name, None)
    if not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise ValueError(f"{name} in the model's config must be a number above 0, got {value!r}")
    return value


class Gemma3MLP(MLP):
    """GELU in its tanh form in the place of SiLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj.parts_of(F.gelu(gate, approximate="tanh") * up)


class Gemma3Layer(nn.Module):
    def __init__(self, spec: DecoderSpec, layer: int, build: Build, cos_sin: torch.Tensor):
        super().__init__()
        self.input_layernorm = make_norm(spec, spec.hidden_size, build)
        self.self_attn = Attention(spec, layer, build, cos_sin)
        self.post_attention_layernorm = make_norm(spec, spec.hidden_size, build)
        self.pre_feedforward_layernorm = make_norm(spec, spec.hidden_size, build)
        self.mlp = Gemma3MLP(spec, build)
        self.post_feedforward_layernorm = make_norm(spec, spec.hidden_size, build)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer.forward`."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.post_attention_layernorm(whole(self.self_attn(x, step, wanted), x.dtype))
        residual = residual if wanted is None else residual[wanted]
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(whole(self.mlp(x), x.dtype)), residual
