"""Phi-3 and Phi-4: Llama with fused projections in the checkpoint; the small ones have a window in every layer."""

from typing import Any

from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.windows import layer_windows


def phi3_spec(hf_config: Any) -> DecoderSpec:
    return DecoderSpec.from_config(hf_config, fused_parts=True, windows=layer_windows(hf_config))
