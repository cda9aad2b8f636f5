"""How many KV blocks there is room for."""

import gc
import logging
import math
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nanovllm.config import Limits
from nanovllm.engine.graph_runner import GraphKey, graph_keys
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.step import ROW_PARAMS, StepInput
from nanovllm.models.decoder import DecoderSpec

logger = logging.getLogger("nanovllm")

GIB = 2**30
CPU_KV_SHARE = 0.25  # of the available memory
SLACK = 128 * 2**20  # bytes on a GPU for fragmentation and for kernels that load after the measurement
MAX_GRAPH_BYTES = 64 * 2**20  # of a graph beyond the first: some 1,000 kernels, of which each takes tens of KiB at most


def kv_bytes_per_block(spec: DecoderSpec, dtype: torch.dtype, block_size: int) -> int:
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def allocate_kv_cache(
    spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim]; the last block is for padding.

    Zeroed, because the torch backend multiplies what is beyond a sequence's length by a weight of 0.
    """
    shape = (spec.num_layers, 2, num_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)
    try:
        if device.type == "cpu":
            return _lazy_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, OSError) as error:  # what torch and the system raise for memory that cannot be had
        gib = (num_blocks + 1) * kv_bytes_per_block(spec, dtype, block_size) / GIB
        raise ValueError(f"no memory for {num_blocks} KV blocks ({gib:.2f} GiB); lower num_kvcache_blocks") from error


def _lazy_zeros(num_bytes: int) -> torch.Tensor:
    """Zeros that the system gives out page by page when they are first used; `torch.zeros` would write them all."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, num_bytes, **private), dtype=torch.uint8)


def check_sizes(spec: DecoderSpec, limits: Limits, dtype: torch.dtype, free_bytes: int) -> None:
    """Refuse what cannot fit before anything of it is allocated: the system may promise memory that it does not have.

    Args:
        spec, limits, dtype: of the model and of its steps.
        free_bytes: of the memory that weights, rotary table and block tables go to.

    Raises:
        ValueError: with the size of each of them, of which the first two are at the very least so large.
    """
    projections = 2 * spec.head_dim * (spec.num_q_heads + spec.num_kv_heads)
    weights = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    weights += spec.num_layers * spec.hidden_size * (projections + 1)
    parts = {
        "weights": weights * dtype.itemsize,
        f"rotary tables for max_model_len {limits.max_model_len}": 4 * spec.head_dim * limits.max_model_len,
        f"tables of max_num_seqs {limits.max_num_seqs}": limits.max_num_seqs * limits.max_model_len // 64,
    }
    if sum(parts.values()) > free_bytes:
        listed = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items())
        raise ValueError(f"the model does not fit the {free_bytes / GIB:.2f} GiB of free memory: {listed}")


def cpu_pool_blocks(
    block_bytes: int, block_size: int, max_num_seqs: int, max_model_len: int, asked: int | None = None
) -> int:
    """The blocks asked for, or those for every sequence at full length, within a share of the memory that is available.

    Raises:
        ValueError: when those asked for, or not even one, fit.
    """
    available = available_host_bytes()
    if asked is not None and asked * block_bytes > available:
        raise ValueError(
            f"num_kvcache_blocks {asked} of {block_bytes / GIB:.6f} GiB do not fit the {available / GIB:.2f} GiB of "
            "free memory"
        )
    if asked is not None:
        return asked
    blocks = min(int(available * CPU_KV_SHARE) // block_bytes, max_num_seqs * -(-max_model_len // block_size))
    if blocks < 1:
        raise ValueError(
            f"a KV block of {block_bytes / GIB:.2f} GiB does not fit {CPU_KV_SHARE:.0%} of the "
            f"{available / GIB:.2f} GiB of free memory; lower kvcache_block_size or set num_kvcache_blocks"
        )
    return blocks


def available_host_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # counts what the page cache would give back, which sysconf does not
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii"))
        if found:
            return int(found[1]) * 1024
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS has the second only
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class GPUMemory:
    """Where an engine's share of a GPU goes, in bytes."""

    free_at_start: int
    utilization: float
    fixed: int  # weights, tables, library workspaces
    activations: int  # peak of the largest step
    graphs: int

    @property
    def left_for_kv(self) -> int:
        return int(self.free_at_start * self.utilization) - self.fixed - self.activations - self.graphs - SLACK

    def blocks(self, block_bytes: int, asked: int | None) -> int:
        """Blocks of the pool: those asked for, or as many as fit.

        Raises:
            ValueError: when they, or even one, do not fit: how much is missing and what helps.
        """
        needed = (1 + (asked or 1)) * block_bytes  # and the padding block
        missing = needed - self.left_for_kv
        if missing > 0:
            raise ValueError(
                f"{missing / GIB:.2f} GiB of GPU memory are missing for a pool of {asked or 1} KV blocks of "
                f"{block_bytes / GIB:.3f} GiB: {self.describe()}. Raise gpu_memory_utilization, lower "
                "max_num_batched_tokens, max_num_seqs or num_kvcache_blocks, or set enforce_eager=True"
            )
        return asked or self.left_for_kv // block_bytes - 1

    def describe(self) -> str:
        return (
            f"of {self.free_at_start / GIB:.2f} GiB free at start, gpu_memory_utilization {self.utilization} allows "
            f"{self.free_at_start * self.utilization / GIB:.2f}; weights and libraries take {self.fixed / GIB:.2f}, "
            f"the largest step {self.activations / GIB:.2f}, CUDA graphs {self.graphs / GIB:.2f}"
        )


def free_gpu_bytes(device: torch.device) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@torch.inference_mode()
def measure_gpu_memory(
    runner: ModelRunner, free_at_start: int, utilization: float, limits: Limits, use_graphs: bool
) -> GPUMemory:
    """Run the largest step there can be, and capture the largest graphs, on a KV cache of two blocks."""
    device = runner.device
    run_largest_step(runner, limits)
    fixed = free_at_start - free_gpu_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    resting = torch.cuda.memory_allocated(device)
    run_largest_step(runner, limits)
    activations = torch.cuda.max_memory_allocated(device) - resting
    graphs = _graph_bytes(runner, graph_keys(limits, runner.attention)) if use_graphs else 0
    return GPUMemory(free_at_start, utilization, fixed, activations, graphs)


def run_largest_step(runner: ModelRunner, limits: Limits) -> None:
    """Raises: ValueError: there is no memory for it."""
    largest = largest_step(limits)
    try:
        runner.launch(largest).token_ids()
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"no GPU memory for a step of {len(largest.token_ids)} tokens and {len(largest.rows)} sequences; lower "
            "max_num_batched_tokens or max_num_seqs"
        ) from error


def _graph_bytes(runner: ModelRunner, keys: list[GraphKey]) -> int:
    """Memory of all graphs, from the two largest: the first brings the pool, each further one about the same.

    Another process on the card may take memory meanwhile: that must not count once for each graph.
    """
    before = free_gpu_bytes(runner.device)
    runner.capture_graphs(keys[-1:])
    one = before - free_gpu_bytes(runner.device)
    runner.drop_graphs()
    before = free_gpu_bytes(runner.device)
    runner.capture_graphs(keys[-2:])
    two = before - free_gpu_bytes(runner.device)
    runner.drop_graphs()
    return one + min(max(two - one, 0), MAX_GRAPH_BYTES) * (len(keys) - 1)


def largest_step(limits: Limits) -> StepInput:
    """As many tokens and sampling sequences as a step may have, all in the block that fresh rows name."""
    num_seqs = limits.max_num_seqs
    num_tokens = min(limits.max_num_batched_tokens, num_seqs * limits.max_model_len)
    lengths = np.full(num_seqs, num_tokens // num_seqs, dtype=np.int32)
    lengths[: num_tokens % num_seqs] += 1
    return StepInput(
        rows=np.arange(num_seqs, dtype=np.int32),
        starts=np.zeros(num_seqs, dtype=np.int32),
        lengths=lengths,
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        samples=np.ones(num_seqs, dtype=np.int32),
        table_changes=np.zeros((3, 0), dtype=np.int32),
        row_params=np.zeros((ROW_PARAMS, 0), dtype=np.int32),
        any_filtered=True,
    )
