"""What an engine runs on and with, from what was asked for: device, dtype, limits, attention backend, block size."""

import logging
import os
from typing import Any

import torch

from nanovllm.config import Config, Limits
from nanovllm.engine.graph_inputs import MAX_PROMPTS
from nanovllm.engine.pacing import Pacer
from nanovllm.engine.shared_prefix import SharedPrefixFinder
from nanovllm.kernels.reference import FP8
from nanovllm.layers.attention import AttentionBackend, TorchAttention
from nanovllm.layers.flash_attention import FlashAttention
from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops, torch_ops, triton_ops
from nanovllm.layers.parallel import Ranks
from nanovllm.models.decoder import DecoderSpec

logger = logging.getLogger("nanovllm")

PACED_WEIGHTS = 10 * 2**30  # bytes on one GPU: with 15 GiB it pays to compute prompts beside decodes, with 1 it costs
FP8_CAPABILITY = (8, 9)  # of GPUs that convert float8 (Ada, Hopper and later)


def choose_device(name: str, ranks: Ranks) -> torch.device:
    """Where a rank runs: of several on GPUs, each has the one after the rank's before."""
    device = _named_device(name)
    if device.type == "cpu":
        return device
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device() if ranks.size == 1 else 0)
    seen = torch.cuda.device_count()
    if ranks.size > 1 and device.index + ranks.size > seen:
        raise ValueError(
            f"tensor_parallel_size {ranks.size} needs as many GPUs from {device} on, torch sees {seen} in all"
        )
    if device.index >= seen:
        raise ValueError(f"device {name!r} was asked for, but torch sees {seen} GPUs, the first of which is cuda:0")
    return torch.device("cuda", device.index + ranks.rank)


def _named_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not known to torch: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch {torch.__version__} sees no GPU")
    return device


def choose_dtype(name: str, hf_config: Any, device: torch.device) -> torch.dtype:
    """The dtype asked for, or for "auto" the checkpoint's where the machine computes fast in it."""
    if name != "auto":
        return getattr(torch, name)
    dtype = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None) or torch.float32
    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"the checkpoint's dtype {dtype} is not supported; choose one with the option dtype")
    chosen = dtype
    if device.type == "cpu" and dtype != torch.float32 and not _cpu_is_fast_in_16_bits(dtype):
        chosen = torch.float32
    elif device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        chosen = torch.float16
    if chosen != dtype:
        logger.warning("the checkpoint is in %s, this %s is not fast in it: using %s", dtype, device.type, chosen)
    return chosen


def _cpu_is_fast_in_16_bits(dtype: torch.dtype) -> bool:
    """Only AMX pays: with AVX512-BF16 alone, the packed float32 kernels measured faster."""
    return dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()


def choose_limits(config: Config, spec: DecoderSpec, device: torch.device) -> Limits:
    """Limits from the config; a default gives way to another value where that one was set."""
    on_cpu = device.type == "cpu"
    tokens = config.max_num_batched_tokens or max(1024 if on_cpu else 16384, config.max_num_seqs or 0)
    max_num_seqs = config.max_num_seqs or min(64 if on_cpu else 512, tokens)
    window, note = spec.max_positions, spec.max_positions_note
    asked = config.max_model_len
    if asked is not None and asked > window:
        raise ValueError(f"max_model_len {asked} exceeds the model's window of {window} tokens{note}")
    if (asked or window) < 2:
        raise ValueError(f"max_model_len must be at least 2 (one prompt token, one generated), got {asked or window}")
    return Limits(max_num_seqs, tokens, asked or window)


def choose_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    spec: DecoderSpec,
    limits: Limits,
    share: bool,
    kv_dtype: torch.dtype,
) -> tuple[Ops, AttentionBackend]:
    """Operations and attention for a backend name; `share`: with a pass over shared prefixes where the backend has it.

    Raises:
        ValueError: a backend that the machine or the model cannot have, and why.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    windows = set(spec.windows) or {None}
    if name == "torch":
        return torch_ops(), TorchAttention(windows, dtype)
    if kv_dtype == FP8 and name == "flash_attn":
        raise ValueError("kv_cache_dtype 'fp8' needs attention_backend 'triton' or 'torch', not 'flash_attn'")
    if device.type == "cpu" and not (name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(
            f"attention_backend {name!r} needs a GPU; on a CPU use 'torch' (or TRITON_INTERPRET=1 to test 'triton')"
        )
    if kv_dtype == FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ValueError(
            "kv_cache_dtype 'fp8' with attention_backend 'triton' needs a GPU that converts float8 (compute "
            f"capability 8.9 or more), not {torch.cuda.get_device_name(device)}"
        )
    if name == "flash_attn":
        return triton_ops(device, dtype), FlashAttention(dtype, spec.head_dim)
    from nanovllm.layers.triton_attention import TritonAttention

    shape = (limits.max_graph_tokens, spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
    return triton_ops(device, dtype), TritonAttention(*shape, device, windows, share)


def choose_pacer(asked: bool | None, model: torch.nn.Module, has_experts: bool, limits: Limits) -> Pacer:
    """What bounds the prompt tokens of steps.

    Args:
        asked: to let sequences start later; None: where it was measured to pay, with many weights and without experts.
    """
    spreads = asked
    if spreads is None:
        spreads = weight_bytes(model) >= PACED_WEIGHTS and not has_experts
    return Pacer(limits.max_graph_tokens, MAX_PROMPTS, spreads)


def weight_bytes(model: torch.nn.Module) -> int:
    """Of a loaded model, in whatever form its layers keep them."""
    float8 = sum(layer.fp8.values.nbytes for layer in model.modules() if isinstance(layer, Linear) and layer.fp8)
    return float8 + sum(parameter.nbytes for parameter in model.parameters())


def shared_prefix_finder(
    attention: AttentionBackend, spec: DecoderSpec, block_size: int, dtype: torch.dtype
) -> SharedPrefixFinder | None:
    """What fills the backend's list of shared prefixes, if it has one."""
    if attention.shared is None:
        return None
    group = spec.num_q_heads // spec.num_kv_heads
    bytes_per_token = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    return SharedPrefixFinder(
        attention.shared.max_batch, attention.shared.max_items, group, block_size, bytes_per_token
    )


def choose_block_size(asked: int | None, attention: AttentionBackend) -> int:
    """16 where blocks are gathered one by one, else 256: few table entries, and whole tiles of keys in one block."""
    if asked is None:
        return 16 if attention.name == "torch" else 256
    if asked % attention.block_multiple:
        raise ValueError(
            f"kvcache_block_size must be a multiple of {attention.block_multiple} for attention_backend "
            f"{attention.name!r}, got {asked}"
        )
    return asked


def check_quantization(spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse float8 weights where they cannot be.

    Raises:
        ValueError: experts, whose kernels know no float8, or a GPU or dtype without torch's scaled GEMM.
    """
    if spec.moe is not None:
        raise ValueError("float8 weights are not supported for models with experts")
    if device.type == "cuda" and dtype != torch.bfloat16:
        raise ValueError(f"float8 weights need dtype 'bfloat16' on a GPU, not {str(dtype).removeprefix('torch.')!r}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ValueError(
            "float8 weights need a GPU that multiplies float8 (compute capability 8.9 or more), not "
            f"{torch.cuda.get_device_name(device)}"
        )
