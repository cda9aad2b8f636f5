"""Llama, and what declares itself a Llama (SmolLM2, TinyLlama, ...)."""

from typing import Any

from nanovllm.models.decoder import DecoderSpec


def llama_spec(hf_config: Any) -> DecoderSpec:
    """Biases are a matter of the config; `attention_bias` means all four attention projections."""
    attention_bias = bool(getattr(hf_config, "attention_bias", False))
    return DecoderSpec.from_config(
        hf_config,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
    )
