"""Scales of a KV cache in float8, chosen once at start.

float8 (e4m3) has the same relative precision over 14 powers of two, so a scale matters only at the ends: keys with a
bias can exceed its largest value of 448, small values fall into its coarse subnormals below 2**-6. What the model's
keys and values look like is seen on a fixed sequence of tokens, whatever the requests, so that equal engines have equal
scales; a power of two rounds nothing by itself. What is larger yet saturates.
"""

from collections.abc import Iterator

import numpy as np
import torch

from nanovllm.config import Limits
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.step import ROW_PARAMS, StepInput
from nanovllm.kernels.reference import FP8_MAX

NUM_TOKENS = 512  # that are looked at
HEADROOM = 2.0  # times the largest value seen; rounding up to a power of two leaves up to twice that


@torch.inference_mode()
def measure_kv_scales(runner: ModelRunner, limits: Limits) -> torch.Tensor:
    """Scales [num_layers, 2, num_kv_heads] float32, of keys and values, from a pass of the model.

    Args:
        runner: with a KV cache in the model's dtype of `calibration_blocks` blocks.
        limits: what the pass has to keep to.
    """
    for inputs in calibration_steps(runner.model.spec.vocab_size, limits, runner.block_size):
        runner.launch(inputs).token_ids()
    blocks = runner.kv_cache[:, :, : calibration_blocks(limits, runner.block_size)]  # the rest of the last one is zero
    return power_of_two_scales(blocks.abs().amax(dim=(2, 3, 5)).float())


def power_of_two_scales(largest: torch.Tensor) -> torch.Tensor:
    """The least powers of two by which HEADROOM times `largest` can be divided to fit; 1 where that is not a number."""
    scales = torch.exp2(torch.ceil(torch.log2(largest * (HEADROOM / FP8_MAX))))
    return torch.where((scales > 0) & scales.isfinite(), scales, 1.0)


def calibration_blocks(limits: Limits, block_size: int) -> int:
    return -(-_num_tokens(limits) // block_size)


def _num_tokens(limits: Limits) -> int:
    return min(NUM_TOKENS, limits.max_model_len - 1)


def calibration_steps(vocab_size: int, limits: Limits, block_size: int) -> Iterator[StepInput]:
    """One sequence of tokens drawn from the whole vocabulary, in the first blocks; in chunks, if steps are short."""
    num_tokens, columns = _num_tokens(limits), np.arange(calibration_blocks(limits, block_size), dtype=np.int32)
    token_ids = np.random.default_rng(0).integers(0, vocab_size, num_tokens, dtype=np.int32)
    table_changes = np.stack([np.zeros_like(columns), columns, columns])
    for start in range(0, num_tokens, limits.max_num_batched_tokens):
        chunk = token_ids[start : start + limits.max_num_batched_tokens]
        yield StepInput(
            rows=np.zeros(1, dtype=np.int32),
            starts=np.array([start], dtype=np.int32),
            lengths=np.array([len(chunk)], dtype=np.int32),
            token_ids=chunk,
            samples=np.ones(1, dtype=np.int32),
            table_changes=table_changes,
            row_params=np.zeros((ROW_PARAMS, 0), dtype=np.int32),
        )
