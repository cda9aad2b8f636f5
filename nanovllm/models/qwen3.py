"""Qwen3: RMS norm on each query and key head before the rotation."""

from typing import Any

from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.qwen2 import refuse_sliding_window


def qwen3_spec(hf_config: Any) -> DecoderSpec:
    refuse_sliding_window(hf_config)
    attention_bias = bool(getattr(hf_config, "attention_bias", False))
    return DecoderSpec.from_config(hf_config, qkv_bias=attention_bias, o_bias=attention_bias, qk_norm=True)
