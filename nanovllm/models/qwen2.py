"""Qwen2 and Qwen2.5: biases on the query, key and value projections, none elsewhere; some layers may have a window."""

from typing import Any

from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.windows import layer_windows


def qwen_windows(hf_config: Any) -> tuple[int | None, ...]:
    """Only if `use_sliding_window` says so: from layer `max_window_layers` on, as `layer_types` says."""
    return layer_windows(hf_config, bool(getattr(hf_config, "use_sliding_window", False)))


def qwen2_spec(hf_config: Any) -> DecoderSpec:
    return DecoderSpec.from_config(hf_config, qkv_bias=True, windows=qwen_windows(hf_config))
