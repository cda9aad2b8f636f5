"""From a `Config` to an engine that can run: checkpoint, machine, model, memory."""

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.layers.attention import AttentionBackend, TorchAttention
from nanovllm.layers.ops import Ops, torch_ops
from nanovllm.models.decoder import Build, DecoderForCausalLM, DecoderSpec
from nanovllm.models.registry import model_spec
from nanovllm.utils.checkpoint import Checkpoint, open_checkpoint
from nanovllm.utils.loader import fill_with_random_weights, load_weights, pack_linears

logger = logging.getLogger("nanovllm")

CPU_KV_SHARE = 0.25  # of the available memory, for the KV pool


@dataclass(frozen=True)
class EngineParts:
    """What `LLMEngine` is put together from."""

    tokenizer: Any
    vocab_size: int
    max_model_len: int
    model_runner: ModelRunner
    scheduler: Scheduler


def build_engine_parts(config: Config) -> EngineParts:
    """Open the checkpoint, choose device, dtype and backend, load the model and size the KV pool."""
    checkpoint = open_checkpoint(config.model)
    hf_config = checkpoint.config()
    spec = model_spec(hf_config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, hf_config, device)
    max_model_len = choose_max_model_len(config.max_model_len, hf_config)
    max_num_seqs, max_num_batched_tokens = choose_step_limits(config, device)
    ops, attention = choose_backend(config.attention_backend, device)
    block_size = config.kvcache_block_size or 16
    model = DecoderForCausalLM(spec, Build(dtype, device, ops, attention, max_model_len))
    packed = load_model(model, config, checkpoint)
    num_blocks = config.num_kvcache_blocks or cpu_pool_blocks(spec, dtype, block_size, max_num_seqs, max_model_len)
    kv_cache = allocate_kv_cache(spec, num_blocks, block_size, dtype, device)
    logger.info(
        "%s on %s in %s, attention backend %s%s, %d KV blocks of %d tokens, up to %d sequences of %d tokens",
        type(hf_config).__name__,
        device,
        str(dtype).removeprefix("torch."),
        attention.name,
        ", packed oneDNN linears" if packed else "",
        num_blocks,
        block_size,
        max_num_seqs,
        max_model_len,
    )
    blocks = BlockManager(num_blocks, block_size, config.enable_prefix_caching)
    tokenizer = checkpoint.tokenizer()
    return EngineParts(
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        model_runner=ModelRunner(model, ops, attention, kv_cache, max_num_seqs, max_model_len),
        scheduler=Scheduler(blocks, max_num_seqs, max_num_batched_tokens, eos_token_ids(checkpoint, tokenizer)),
    )


def choose_device(name: str) -> torch.device:
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
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
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


def choose_max_model_len(asked: int | None, hf_config: Any) -> int:
    window = hf_config.max_position_embeddings
    if asked is not None and asked > window:
        raise ValueError(f"max_model_len {asked} exceeds the model's window of {window} tokens")
    if (asked or window) < 2:
        raise ValueError(f"max_model_len must be at least 2 (one prompt token, one generated), got {asked or window}")
    return asked or window


def choose_step_limits(config: Config, device: torch.device) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens): a default gives way to the other value where that one was set."""
    on_cpu = device.type == "cpu"
    tokens = config.max_num_batched_tokens or max(2048 if on_cpu else 16384, config.max_num_seqs or 0)
    return config.max_num_seqs or min(64 if on_cpu else 512, tokens), tokens


def choose_backend(name: str, device: torch.device) -> tuple[Ops, AttentionBackend]:
    if name in ("auto", "torch"):
        return torch_ops(), TorchAttention()
    raise ValueError(f"attention_backend {name!r} is not available in this version")


def load_model(model: DecoderForCausalLM, config: Config, checkpoint: Checkpoint) -> bool:
    """Fill the parameters; True when linear layers were repacked for the CPU."""
    if config.load_format == "dummy":
        fill_with_random_weights(model, config.seed)
    else:
        load_weights(model, checkpoint.weights(), str(checkpoint.path))
    return pack_linears(model)


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Any) -> frozenset[int]:
    """Every id of the generation config, and the tokenizer's own."""
    ids = set(checkpoint.eos_token_ids())
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def kv_bytes_per_block(spec: DecoderSpec, dtype: torch.dtype, block_size: int) -> int:
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def cpu_pool_blocks(
    spec: DecoderSpec, dtype: torch.dtype, block_size: int, max_num_seqs: int, max_model_len: int
) -> int:
    """Blocks for every sequence at full length, within a share of the memory that is available."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    affordable = int(available * CPU_KV_SHARE) // kv_bytes_per_block(spec, dtype, block_size)
    blocks = min(affordable, max_num_seqs * -(-max_model_len // block_size))
    if blocks < 1:
        raise ValueError(f"{available / 2**30:.2f} GiB of free memory leave no room for a KV cache")
    return blocks


def allocate_kv_cache(
    spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim]; the last block is for padding.

    Zeroed, because attention over a partly written block multiplies what is beyond its length by 0.
    """
    shape = (spec.num_layers, 2, num_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)
