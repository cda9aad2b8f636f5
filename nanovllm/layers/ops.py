"""The elementwise operations of a decoder, in plain torch or as Triton kernels, behind one set of names."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ops:
    """Signatures and shapes are documented in `nanovllm.kernels.reference`."""

    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[..., torch.Tensor]
    norm_rope_store: Callable[..., torch.Tensor]
    gumbel_sample: Callable[..., torch.Tensor]


def torch_ops() -> Ops:
    """Plain torch: the CPU's own path, and what the kernels are tested against."""
    from nanovllm.kernels import reference

    return Ops(
        reference.rms_norm,
        reference.add_rms_norm,
        reference.silu_mul,
        reference.norm_rope_store,
        reference.gumbel_sample,
    )


def triton_ops() -> Ops:
    """Triton kernels. Imported here, so that a machine without Triton can run the torch ones."""
    from nanovllm.kernels.norm_rope_store import norm_rope_store
    from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
    from nanovllm.kernels.sampling import gumbel_sample
    from nanovllm.kernels.silu_mul import silu_mul

    return Ops(rms_norm, add_rms_norm, silu_mul, norm_rope_store, gumbel_sample)
