"""OLMo 3: OLMo 2 with a window in most layers, which are rotated without the others' scaling."""

from typing import Any

from nanovllm.layers.rotary_embedding import rope_settings
from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.olmo2 import olmo2_spec
from nanovllm.models.windows import layer_windows


def olmo3_spec(hf_config: Any) -> DecoderSpec:
    return olmo2_spec(
        hf_config,
        windows=layer_windows(hf_config),
        rope=rope_settings(hf_config, "full_attention"),
        window_rope=rope_settings(hf_config, "sliding_attention"),
    )
