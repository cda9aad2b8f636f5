"""Qwen3: RMS norm on each query and key head before the rotation."""

from typing import Any

from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.qwen2 import qwen_windows


def qwen3_spec(hf_config: Any) -> DecoderSpec:
    bias = bool(getattr(hf_config, "attention_bias", False))
    windows = qwen_windows(hf_config)
    return DecoderSpec.from_config(hf_config, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=windows)
