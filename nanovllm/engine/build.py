"""From a `Config` to an engine that can run: checkpoint, machine, model, memory."""

import logging
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.config import Config, Limits
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.choices import (
    check_quantization,
    choose_backend,
    choose_block_size,
    choose_device,
    choose_dtype,
    choose_limits,
    choose_pacer,
    shared_prefix_finder,
)
from nanovllm.engine.graph_runner import graph_keys
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
from nanovllm.engine.step import StepBuilder
from nanovllm.kernels.reference import FP8
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.ops import Ops
from nanovllm.layers.parallel import Ranks
from nanovllm.layers.rotary_embedding import LongRope
from nanovllm.models.decoder import Build, DecoderForCausalLM, DecoderSpec
from nanovllm.models.registry import model_spec
from nanovllm.models.split import rank_spec
from nanovllm.utils.checkpoint import Checkpoint, open_checkpoint
from nanovllm.utils.device import made_current
from nanovllm.utils.loader import cuts, fill_with_random_weights, finish_loading, is_packed, load_weights
from nanovllm.utils.quantization import Quantization, choose_quantization, quantize_layers

logger = logging.getLogger("nanovllm")


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
            runner.capture_graphs(graph_keys(self.limits, self.attention))


def build_engine_parts(config: Config) -> EngineParts:
    """Open the checkpoint, choose device, dtype and backend, load the model and size the KV pool."""
    if config.tensor_parallel_size > 1:
        check_may_start_workers()
    with made_current(choose_device(config.device, Ranks(0, config.tensor_parallel_size))):
        return _build_engine_parts(config)


def _build_engine_parts(config: Config) -> EngineParts:
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
    paced = rank.use_graphs and rank.attention.graph_prompts
    pacer = choose_pacer(config.paced_prompts, rank.model, spec.moe is not None, limits) if paced else None
    finder = shared_prefix_finder(rank.attention, rank.model.spec, rank.block_size, rank.kv_dtype)
    return EngineParts(
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        max_model_len=limits.max_model_len,
        long_rope=spec.long_rope(limits.max_model_len),
        model_runner=runner,
        scheduler=Scheduler(blocks, limits.max_num_seqs, limits.max_num_batched_tokens, eos, pacer),
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
    ops, attention = choose_backend(config.attention_backend, device, dtype, held, limits, share, kv_dtype)
    if config.shared_prefix_attention and attention.shared is None:
        if attention.name == "triton":
            raise ValueError("shared_prefix_attention needs layers without a window, of which this model has none")
        raise ValueError(f"shared_prefix_attention needs attention_backend 'triton', not {attention.name!r}")
    use_graphs = device.type == "cuda" and attention.graphs and not config.enforce_eager
    if config.paced_prompts and not (use_graphs and attention.graph_prompts):
        raise ValueError("paced_prompts needs CUDA graphs (a GPU, no enforce_eager) and attention_backend 'triton'")
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
