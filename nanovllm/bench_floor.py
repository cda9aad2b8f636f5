"""What a benchmark's decode steps have to read from memory, whoever runs them: the KV cache and the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanovllm.models.decoder import DecoderSpec


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    output_len: int


def decode_kv_bytes(requests: Sequence[Request], bytes_per_token: int) -> int:
    """KV that decode has to read: each generated token but the first attends to all before it."""
    return sum(sum(range(len(r.prompt) + 1, len(r.prompt) + r.output_len)) * bytes_per_token for r in requests)


def decode_batches(requests: Sequence[Request], n: int) -> list[int]:
    """Sequences in each decode step, when all requests (`n` completions of each) run from the start."""
    steps = max(r.output_len for r in requests) - 1
    return [n * sum(r.output_len - 1 > step for r in requests) for step in range(steps)]


def experts_touched(batch: int, num_experts: int, top_k: int) -> float:
    """Experts that a step needs, on average, where every choice of `top_k` is as likely (so with random weights)."""
    return num_experts * (1 - (1 - top_k / num_experts) ** batch)


def decode_weight_bytes(
    batches: Sequence[int], spec: DecoderSpec, dtype: torch.dtype, linear_bytes: int | None = None
) -> int:
    """Weights that decode steps of these batch sizes have to read: all matrices once a step, and experts in use.

    `linear_bytes`: of an element of the linear layers, where they are not in `dtype` as the LM head is.
    """
    hidden, moe = spec.hidden_size, spec.moe
    attention = 2 * (spec.num_q_heads + spec.num_kv_heads) * spec.head_dim * hidden
    num_sparse = len(moe.layers) if moe else 0
    mlps = 3 * hidden * spec.intermediate_size * (spec.num_layers - num_sparse)
    linears = (attention * spec.num_layers + mlps) * (linear_bytes or dtype.itemsize) // dtype.itemsize
    elements: float = (linears + spec.vocab_size * hidden) * len(batches)
    if moe:
        touched = sum(experts_touched(batch, moe.num_experts, moe.top_k) for batch in batches)
        elements += num_sparse * hidden * (moe.num_experts * len(batches) + 3 * moe.intermediate_size * touched)
    return int(elements * dtype.itemsize)
