"""From a `Config` to an engine that can run: checkpoint, machine, model, memory."""

import logging
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.config import Config, Limits
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.graph_runner import graph_batch_sizes, shared_batch_sizes
from nanovllm.engine.kv_scales import calibration_blocks, measure_kv_scales
from nanovllm.engine.memory import (
    allocate_kv_cache,
    available_host_bytes,
    check_sizes,
    cpu_pool_blocks,
    free_gpu_bytes,
    kv_bytes_per_block,
    measure_gpu_memory,
)
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.precompile import compile_kernels
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.shared_prefix import SharedPrefixFinder
from nanovllm.engine.step import StepBuilder
from nanovllm.kernels.reference import FP8
from nanovllm.layers.attention import AttentionBackend, TorchAttention
from nanovllm.layers.flash_attention import FlashAttention
from nanovllm.layers.ops import Ops, torch_ops, triton_ops
from nanovllm.layers.parallel import Ranks
from nanovllm.layers.rotary_embedding import LongRope
from nanovllm.models.decoder import Build, DecoderForCausalLM, DecoderSpec
from nanovllm.models.registry import model_spec
from nanovllm.models.split import rank_spec
from nanovllm.utils.checkpoint import Checkpoint, open_checkpoint
from nanovllm.utils.loader import cuts, fill_with_random_weights, finish_loading, is_packed, load_weights
from nanovllm.utils.quantization import Quantization, choose_quantization, quantize_layers

logger = logging.getLogger("nanovllm")

FP8_CAPABILITY = (8, 9)  # of GPUs that convert float8 (Ada, Hopper and later)


@dataclass(frozen=True)
class EngineParts:
    """What `LLMEngine` is put together from."""

    tokenizer: Any
    vocab_size: int
    max_model_len: int
    long_rope: LongRope | None
    model_runner: ModelRunner
    scheduler: Scheduler
    step_builder: StepBuilder
    overlap: bool


@dataclass(frozen=True)
class RankParts:
    """One rank's share of a model, loaded, and the KV blocks that it has room for."""

    model: DecoderForCausalLM
    ops: Ops
    attention: AttentionBackend
    limits: Limits
    dtype: torch.dtype
    device: torch.device
    block_size: int
    use_graphs: bool
    kv_dtype: torch.dtype
    kv_scales: torch.Tensor | None
    quantization: Quantization | None
    num_blocks: int
    memory: str  # how it came to that

    def runner(self, num_blocks: int, make: Callable[..., ModelRunner] = ModelRunner) -> ModelRunner:
        """With a pool of so many blocks. `make` takes what `ModelRunner` takes."""
        kv_cache = allocate_kv_cache(self.model.spec, num_blocks, self.block_size, self.kv_dtype, self.device)
        return make(self.model, self.ops, self.attention, kv_cache, self.limits, self.kv_scales)

    def capture_graphs(self, runner: ModelRunner) -> None:
        if self.use_graphs:
            most = self.limits.max_num_seqs
            runner.capture_graphs(graph_batch_sizes(most), shared_batch_sizes(most) if self.attention.shared else [])


def build_engine_parts(config: Config) -> EngineParts:
    """Open the checkpoint, choose device, dtype and backend, load the model and size the KV pool."""
    if config.tensor_parallel_size > 1:
        check_may_start_workers()
    checkpoint = open_checkpoint(config.model)
    hf_config = checkpoint.config()
    spec = model_spec(hf_config)
    if config.tensor_parallel_size == 1:
        rank = build_rank(config, checkpoint, spec, Ranks())
        num_blocks = rank.num_blocks
        if rank.device.type == "cuda":
            logger.info("%s", rank.memory)
        runner = rank.runner(num_blocks)
        rank.capture_graphs(runner)
    else:
        from nanovllm.engine.tensor_parallel import build_ranks  # with it come multiprocessing and shared memory

        rank, runner, num_blocks = build_ranks(config, checkpoint, spec)
    logger.info(
        "%s on %s in %s%s, attention backend %s, %s, %d KV blocks of %d tokens in %s, up to %d sequences of %d tokens",
        hf_config.architectures[0],
        f"{config.tensor_parallel_size} ranks, {rank.device} first" if config.tensor_parallel_size > 1 else rank.device,
        str(rank.dtype).removeprefix("torch."),
        f" with {rank.quantization.describe()}" if rank.quantization is not None else "",
        rank.attention.name,
        "CUDA graphs" if rank.use_graphs else "packed oneDNN linears" if is_packed(rank.model) else "no CUDA graphs",
        num_blocks,
        rank.block_size,
        describe_kv(rank.kv_dtype, rank.kv_scales),
        rank.limits.max_num_seqs,
        rank.limits.max_model_len,
    )
    tokenizer = checkpoint.tokenizer()
    blocks = BlockManager(num_blocks, rank.block_size, config.enable_prefix_caching)
    eos = eos_token_ids(checkpoint, tokenizer, spec.vocab_size)
    limits = rank.limits
    finder = shared_prefix_finder(rank.attention, rank.model.spec, rank.block_size, rank.kv_dtype)
    return EngineParts(
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        max_model_len=limits.max_model_len,
        long_rope=spec.long_rope(limits.max_model_len),
        model_runner=runner,
        scheduler=Scheduler(blocks, limits.max_num_seqs, limits.max_num_batched_tokens, eos),
        step_builder=StepBuilder(limits.max_num_seqs, eos, finder),
        overlap=rank.device.type == "cuda" if config.overlap is None else config.overlap,
    )


def build_rank(
    config: Config,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    ranks: Ranks,
    connect: Callable[[torch.device], None] | None = None,
) -> RankParts:
    """Load a rank's share of the model, and find out how many KV blocks it has room for.

    Args:
        spec: of the whole model.
        ranks: who this is among those that share it.
        connect: called once the weights are loaded; after it, `ranks` can talk to each other.
    """
    device = choose_device(config.device, ranks)
    free_at_start = free_gpu_bytes(device) if device.type == "cuda" else 0
    limits = choose_limits(config, spec, device)
    dtype = choose_dtype(config.dtype, spec.hf_config, device)
    held = rank_spec(spec, ranks.size)
    quantization = choose_quantization(config.quantization, spec.hf_config)
    if quantization is not None:
        check_quantization(held, device, dtype)
        if quantization.form is not None and ranks.size > 1:
            raise ValueError(
                f"a checkpoint that is stored in float8 cannot be split over tensor_parallel_size {ranks.size} GPUs; "
                "one in 16 bits can, with quantization='fp8'"
            )
    kv_dtype = FP8 if config.kv_cache_dtype == "fp8" else dtype
    free = free_at_start if device.type == "cuda" else available_host_bytes() // ranks.size
    check_sizes(replace(held, vocab_size=ranks.padded_vocab(spec.vocab_size)), limits, dtype, free)
    share = config.shared_prefix_attention is not False
    ops, attention = choose_backend(config.attention_backend, device, dtype, held, limits.max_num_seqs, share, kv_dtype)
    if config.shared_prefix_attention and attention.shared is None:
        raise ValueError(f"shared_prefix_attention needs attention_backend 'triton', not {attention.name!r}")
    block_size = choose_block_size(config.kvcache_block_size, attention)
    build = Build(dtype, device, ops, attention, limits.max_model_len, ranks)
    model = load_model(held, build, config, checkpoint, quantization)
    if connect is not None:
        connect(device)
    kv_scales: torch.Tensor | None = None

    def runner_for(num_blocks: int, kv_dtype: torch.dtype = kv_dtype) -> ModelRunner:
        kv_cache = allocate_kv_cache(held, num_blocks, block_size, kv_dtype, device)
        return ModelRunner(model, ops, attention, kv_cache, limits, kv_scales)

    if kv_dtype == FP8:
        kv_scales = measure_kv_scales(runner_for(calibration_blocks(limits, block_size), dtype), limits)
    use_graphs = device.type == "cuda" and attention.graphs and not config.enforce_eager
    block_bytes = kv_bytes_per_block(held, kv_dtype, block_size)
    if device.type == "cuda":
        small = runner_for(1)
        compile_kernels(small, limits, use_graphs)
        memory = measure_gpu_memory(small, free_at_start, config.gpu_memory_utilization, limits, use_graphs)
        del small
        note = memory.describe()
        num_blocks = memory.blocks(block_bytes, config.num_kvcache_blocks)
    else:
        num_blocks = cpu_pool_blocks(  # all ranks' pools come from the same memory
            block_bytes * ranks.size, block_size, limits.max_num_seqs, limits.max_model_len, config.num_kvcache_blocks
        )
        note = f"{num_blocks} KV blocks of {block_bytes} bytes in host memory"
    return RankParts(
        model=model,
        ops=ops,
        attention=attention,
        limits=limits,
        dtype=dtype,
        device=device,
        block_size=block_size,
        use_graphs=use_graphs,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        quantization=quantization,
        num_blocks=num_blocks,
        memory=note,
    )


def describe_kv(dtype: torch.dtype, scales: torch.Tensor | None) -> str:
    name = str(dtype).removeprefix("torch.")
    if scales is None:
        return name
    keys, values = scales.amax(dim=(0, 2)).tolist()
    return f"{name} (largest scale of keys {keys:g}, of values {values:g})"


def check_may_start_workers() -> None:
    """Refuse to start processes in one that is itself just being started.

    Raises:
        RuntimeError: with what to do about it.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a process that LLM(..., tensor_parallel_size=N) starts runs the program's main script once more, up to "
            'its `if __name__ == "__main__":`; put what makes the LLM under such a line'
        )


def choose_device(name: str, ranks: Ranks) -> torch.device:
    """Where a rank runs: of several on GPUs, each has the one after the rank's before."""
    device = _named_device(name)
    if ranks.size == 1 or device.type == "cpu":
        return device
    first = device.index or 0
    if first + ranks.size > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size {ranks.size} needs as many GPUs from {device} on, torch sees "
            f"{torch.cuda.device_count()} in all"
        )
    return torch.device("cuda", first + ranks.rank)


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
    max_num_seqs: int,
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

    shape = (max_num_seqs, spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
    return triton_ops(device, dtype), TritonAttention(*shape, device, windows, share)


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


def load_model(
    spec: DecoderSpec, build: Build, config: Config, checkpoint: Checkpoint, quantization: Quantization | None
) -> DecoderForCausalLM:
    """Build the model and fill its parameters."""
    try:
        model = DecoderForCausalLM(spec, build)
    except RuntimeError as error:  # what torch raises for memory it cannot have, on either device
        raise ValueError(f"no memory for the model's weights on {build.device}: {error}") from error
    if quantization is not None:
        quantize_layers(model, quantization, quantization.form is not None and config.load_format != "dummy")
    if config.load_format == "dummy":
        fill_with_random_weights(model, config.seed, build.ranks.rank if build.ranks.size > 1 else None)
    else:
        load_weights(model, checkpoint.weights(build.device, cuts(model)), str(checkpoint.path))
    finish_loading(model, build.ops)
    return model


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Every id of the generation config, and the tokenizer's own, as far as the model can draw them."""
    ids = set(checkpoint.eos_token_ids())
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    beyond = sorted(token_id for token_id in ids if token_id >= vocab_size)
    if beyond:
        logger.warning("end-of-sequence ids %s are outside the model's vocabulary of %d", beyond, vocab_size)
    return frozenset(ids.difference(beyond))
