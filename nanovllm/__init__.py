"""nano-vllm: an LLM inference engine for offline batches that a person can read in an afternoon."""

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
