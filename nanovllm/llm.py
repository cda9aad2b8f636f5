"""The name users import. All behaviour lives in `LLMEngine`."""

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """`LLM(model, **config)`: see `LLMEngine` for the methods and `Config` for the options."""
