"""Qwen3-MoE: Qwen3 with experts in the place of the MLP in some layers, usually all."""

from dataclasses import replace
from typing import Any

from nanovllm.layers.moe import MoESpec
from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.qwen3 import qwen3_spec

MAX_EXPERTS = 1024  # what one program of the routing kernels can hold


def qwen3_moe_spec(hf_config: Any) -> DecoderSpec:
    """Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` names it.

    Raises:
        ValueError: a count that makes no sense, by name.
    """
    spec = qwen3_spec(hf_config)
    num_experts = _count(hf_config, "num_experts", 0, MAX_EXPERTS)
    step = _count(hf_config, "decoder_sparse_step", 1)
    dense = hf_config.mlp_only_layers or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ValueError(f"mlp_only_layers in the model's config must be a list of layer numbers, got {dense!r}")
    layers = frozenset(i for i in range(spec.num_layers) if i not in dense and (i + 1) % step == 0)
    if not num_experts or not layers:
        return spec
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(hf_config, name) % 8:
            raise ValueError(f"{name} {getattr(hf_config, name)} in the model's config is not a multiple of 8")
    moe = MoESpec(
        layers=layers,
        num_experts=num_experts,
        top_k=_count(hf_config, "num_experts_per_tok", 1, num_experts),
        intermediate_size=_count(hf_config, "moe_intermediate_size", 1),
        normalize=bool(hf_config.norm_topk_prob),
    )
    return replace(spec, moe=moe)


def _count(hf_config: Any, name: str, low: int, high: int = 2**31 - 1) -> int:
    value = getattr(hf_config, name, None)
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} in the model's config must be from {low} to {high}, got {value!r}")
    return value
