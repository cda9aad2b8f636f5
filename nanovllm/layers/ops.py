"""The elementwise operations of a decoder, in plain torch or as Triton kernels, behind one set of names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Up to so many rows a decode step runs on our own matrix kernels (see `small_gemm`).
SMALL_ROWS = 16
# Up to so many rows the launches of our own kernels overlap: in larger steps the gaps between them do not count.
OVERLAP_ROWS = 256


@dataclass(frozen=True)
class Ops:
    """Signatures and shapes are documented in `nanovllm.kernels.reference`, of `moe` in `moe_reference`, of
    `filtered_sample` and
    `penalise` in `nanovllm.layers.sampler`."""

    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[..., torch.Tensor]
    norm_rope_store: Callable[..., torch.Tensor]
    gumbel_sample: Callable[..., torch.Tensor]
    gumbel_best: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    filtered_sample: Callable[..., torch.Tensor]
    penalise: Callable[..., torch.Tensor]
    decode_inputs: Callable[..., Any]
    fp8_linear: Callable[..., torch.Tensor]  # documented in `fp8_reference`
    moe: Callable[..., torch.Tensor]  # its result as it is, or as parts for add_rms_norm
    small_linear: Callable[..., torch.Tensor] | None = None  # x [1..SMALL_ROWS, in], weight, bias; None: not faster
    split_linear: Callable[..., torch.Tensor] | None = None  # x, weight to parts for add_rms_norm; None: not faster
    fp8_split_linear: Callable[..., torch.Tensor] | None = None  # x, weight, scales, input_scale to the same


def torch_ops() -> Ops:
    """Plain torch: the CPU's own path, and what the kernels are tested against."""
    from nanovllm.kernels import fp8_reference, moe_reference, reference
    from nanovllm.layers.sampler import filtered_sample, penalise

    return Ops(
        reference.rms_norm,
        reference.add_rms_norm,
        reference.silu_mul,
        reference.norm_rope_store,
        reference.gumbel_sample,
        reference.gumbel_best,
        filtered_sample,
        penalise,
        reference.decode_inputs,
        fp8_reference.fp8_linear,
        moe_reference.moe,
    )


def triton_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """Triton kernels. Imported here, so that a machine without Triton can run the torch ones.

    From Hopper on, launches of decode batches overlap (programmatic dependent launch): a kernel starts while the one
    before ends, and waits for its results only where it needs them.
    """
    from nanovllm.kernels.decode_inputs import decode_inputs
    from nanovllm.kernels.fp8_linear import fp8_linear
    from nanovllm.kernels.fp8_split_gemm import fp8_split_linear
    from nanovllm.kernels.moe import moe
    from nanovllm.kernels.norm_rope_store import norm_rope_store
    from nanovllm.kernels.penalties import penalise
    from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
    from nanovllm.kernels.sampling import filtered_sample, gumbel_best, gumbel_sample
    from nanovllm.kernels.silu_mul import silu_mul
    from nanovllm.kernels.small_gemm import small_linear
    from nanovllm.kernels.split_gemm import split_linear

    sampling = gumbel_sample, gumbel_best, filtered_sample, penalise
    if not has_dependent_launch(device) or dtype == torch.float32:
        return Ops(rms_norm, add_rms_norm, silu_mul, norm_rope_store, *sampling, decode_inputs, fp8_linear, moe)
    return Ops(
        _overlapping(rms_norm),
        _overlapping(add_rms_norm),
        _overlapping(silu_mul),
        _overlapping(norm_rope_store),
        *sampling,
        decode_inputs,
        _overlapping(fp8_linear),
        _overlapping(moe),
        _overlapping(small_linear),
        _overlapping(split_linear),
        _overlapping(fp8_split_linear),
    )


def has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _overlapping(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, *args: Any) -> Any:
        return kernel(x, *args, pdl=x.shape[-2] <= OVERLAP_ROWS)

    return run
