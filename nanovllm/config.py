"""Options of the engine: validated once, before anything is loaded."""

from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

from nanovllm.sampling_params import checked_int, checked_real

ATTENTION_BACKENDS = ("auto", "triton", "flash_attn", "torch")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_RANKS = 8
QUANTIZATIONS = ("fp8",)
KV_CACHE_DTYPES = ("auto", "fp8")
MAX_NUM_SEQS = 2**16  # each has a row of state whether it runs or not
GRAPH_PROMPT_TOKENS = 256  # that a CUDA graph has room for beside a decode of every sequence
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class Limits:
    """What bounds a step and a sequence, once model and machine are known."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def max_graph_tokens(self) -> int:
        """Tokens that a step in a CUDA graph may have: a decode of each sequence, and some prompt tokens."""
        return min(self.max_num_seqs + GRAPH_PROMPT_TOKENS, self.max_num_batched_tokens)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `LLM(model, **options)` accepts. `None` means "what suits the model and the machine".

    Args:
        model: a folder with a checkpoint, a `.gguf` file (or a folder holding one), or a Hub id.
        max_num_batched_tokens: tokens that one step may process (default 16384, on a CPU 1024).
        max_num_seqs: sequences that run at the same time (default 512, on a CPU 64).
        max_model_len: longest sequence, prompt and completion together (default: the model's own window).
        gpu_memory_utilization: share of the GPU memory free at start that the engine may use.
        tensor_parallel_size: GPUs of this machine to split the model over, at most 8, each with a process of its own;
            on a CPU so many processes. Query heads and intermediate size have to divide by it.
        enforce_eager: run without CUDA graphs.
        kvcache_block_size: tokens in one KV block, a multiple of 16 (default 16 with the `torch` backend, else 256).
        num_kvcache_blocks: size of the KV pool in blocks (default: all the memory that is left).
        enable_prefix_caching: reuse the KV of equal prefixes.
        dtype: "auto" follows the checkpoint where the machine computes fast in it.
        kv_cache_dtype: "auto" is the model's dtype; "fp8" is float8 (e4m3) with a scale per layer and KV head, half the
            memory and half the reading of 16 bits. Not with `flash_attn`.
        quantization: "fp8" brings the linear layers' weights (not embeddings and LM head) to float8 (e4m3) with a scale
            per output once they are loaded, and their inputs with a scale per token. A checkpoint in float8 says so
            itself.
        load_format: "dummy" gives random weights and needs no weight files.
        device: "auto" takes the GPU when there is one, else the CPU.
        attention_backend: "auto" is `triton` on a GPU and `torch` on a CPU.
        shared_prefix_attention: read the KV of a prefix that running sequences share once a step for all of them, where
            that pays (default: with the `triton` backend, which alone can).
        overlap: prepare a step while the one before runs (default: on a GPU). The tokens are the same either way.
        paced_prompts: let sequences of one `generate` whose lengths are known (`ignore_eos`, no stops) start later than
            they could, longest ones first, so that their prompts are computed beside the others' decodes: the whole
            ends earlier, but single ones wait longer (default: with 10 GiB of weights on a GPU, no experts).
        seed: seed of every request (any integer of 64 bits).

    Raises:
        TypeError: an unknown option, or a value of the wrong type.
        ValueError: a value out of range.
    """

    model: str | PathLike[str]
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    enable_prefix_caching: bool = True
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    shared_prefix_attention: bool | None = None
    overlap: bool | None = None
    paced_prompts: bool | None = None
    seed: int = 0

    @classmethod
    def build(cls, model: Any, options: dict[str, Any]) -> "Config":
        """Config from what a user gave, naming an unknown option together with the known ones."""
        known = [field.name for field in fields(cls) if field.name != "model"]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"unknown LLM option {', '.join(map(repr, unknown))}; options are {', '.join(known)}")
        return cls(model=model, **options)

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, PathLike)):
            raise TypeError(f"model must be a path or a Hub id, got {self.model!r}")
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "num_kvcache_blocks"):
            if getattr(self, name) is not None:
                largest = MAX_NUM_SEQS if name == "max_num_seqs" else 2**31 - 1
                self._set(name, checked_int(name, getattr(self, name), 1, largest))
        self._set("tensor_parallel_size", checked_int("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS))
        self._set("seed", checked_int("seed", self.seed, -(2**63), 2**63 - 1))
        for name in ("enforce_eager", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("overlap", "paced_prompts", "shared_prefix_attention"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True, False or None, got {getattr(self, name)!r}")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, QUANTIZATIONS, "None or ")
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if not isinstance(self.device, str):
            raise TypeError(f"device must be a string such as 'auto', 'cpu' or 'cuda', got {self.device!r}")
        self._check_memory()
        if self.max_num_batched_tokens and self.max_num_seqs and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), since every running sequence gets one token a step"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # a plain Python number in a frozen dataclass

    def _check_memory(self) -> None:
        share = checked_real("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1)
        if share == 0:
            raise ValueError("gpu_memory_utilization must be above 0, got 0")
        self._set("gpu_memory_utilization", share)
        if self.kvcache_block_size is not None:
            self._set("kvcache_block_size", checked_int("kvcache_block_size", self.kvcache_block_size, 16, 2**20))
            if self.kvcache_block_size % 16:
                raise ValueError(f"kvcache_block_size must be a multiple of 16, got {self.kvcache_block_size}")


def _check_choice(name: str, value: object, choices: tuple[str, ...], other: str = "") -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be {other}one of {', '.join(choices)}, got {value!r}")
