"""Qwen2 and Qwen2.5: biases on the query, key and value projections, none elsewhere."""

from typing import Any

from nanovllm.models.decoder import DecoderSpec


def refuse_sliding_window(hf_config: Any) -> None:
    if getattr(hf_config, "use_sliding_window", False):
        raise ValueError(f"use_sliding_window is not supported (sliding_window {hf_config.sliding_window})")


def qwen2_spec(hf_config: Any) -> DecoderSpec:
    refuse_sliding_window(hf_config)
    return DecoderSpec.from_config(hf_config, qkv_bias=True)
