"""Phi-3 and Phi-4: Llama with fused projections in the checkpoint; some have a window, some rotate heads in part."""

from typing import Any

from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.windows import layer_windows


def phi3_spec(hf_config: Any) -> DecoderSpec:
    windows = layer_windows(hf_config)
    return DecoderSpec.from_config(hf_config, fused_parts=True, windows=windows, partial_rotary=True)
