"""From a checkpoint's `architectures` to the family that runs it."""

from collections.abc import Callable
from typing import Any

from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.gemma3 import gemma3_spec
from nanovllm.models.llama import llama_spec
from nanovllm.models.mistral import mistral_spec
from nanovllm.models.olmo2 import olmo2_spec
from nanovllm.models.olmo3 import olmo3_spec
from nanovllm.models.phi3 import phi3_spec
from nanovllm.models.qwen2 import qwen2_spec
from nanovllm.models.qwen3 import qwen3_spec
from nanovllm.models.qwen3_moe import qwen3_moe_spec

FAMILIES: dict[str, Callable[[Any], DecoderSpec]] = {
    "Gemma3ForCausalLM": gemma3_spec,
    "LlamaForCausalLM": llama_spec,
    "MistralForCausalLM": mistral_spec,
    "Olmo2ForCausalLM": olmo2_spec,
    "Olmo3ForCausalLM": olmo3_spec,
    "Phi3ForCausalLM": phi3_spec,
    "Qwen2ForCausalLM": qwen2_spec,
    "Qwen3ForCausalLM": qwen3_spec,
    "Qwen3MoeForCausalLM": qwen3_moe_spec,
}


def model_spec(hf_config: Any) -> DecoderSpec:
    """The decoder that a checkpoint's config describes.

    Raises:
        ValueError: an architecture or a setting that is not supported, by name.
    """
    architectures = getattr(hf_config, "architectures", None) or []
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name](hf_config)
    raise ValueError(f"model architecture {architectures} is not supported; supported are {', '.join(FAMILIES)}")
