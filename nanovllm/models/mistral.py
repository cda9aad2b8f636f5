"""Mistral: Llama without biases, and a window in every layer where the config has one."""

from typing import Any

from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.windows import layer_windows


def mistral_spec(hf_config: Any) -> DecoderSpec:
    return DecoderSpec.from_config(hf_config, windows=layer_windows(hf_config))
