"""Linear layers in float8 (e4m3) in plain torch: what the kernels are tested against, and the CPU's own path.

A weight has a scale for each output, activations one for each token, chosen from its largest value on the way in
("dynamic") or given by the checkpoint ("static"). Products of float8 are exact in float32, and so are the sums up to
their order; the scales come last.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.reference import FP8, FP8_MAX

SMALLEST = 1e-12  # amount of a row at which its scale ends: rows of zeros


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 [out, in], scales [out] float32) of a weight [out, in]: the largest of a row becomes FP8_MAX."""
    return quantize_rows(weight)


def quantize_rows(x: torch.Tensor, input_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 [rows, columns], scales [rows] float32) whose product is x, rounded.

    input_scale: [] or [1] float32, for all rows; what is too large for it saturates. None: from each row's largest
    """
    wide = x.float()
    if input_scale is None:
        largest = wide.abs().amax(dim=-1).clamp_(min=SMALLEST)
        scales, factors = largest * (1 / FP8_MAX), largest.reciprocal() * FP8_MAX
    else:
        scales = input_scale.float().reshape(1).expand(x.shape[0]).contiguous()
        factors = scales.reciprocal()
    return (wide * factors[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ (weight * scales).T + bias with x in float8 too.

    x: [rows, in]; weight: [out, in] float8, or float32 of such values; scales: [out] float32; bias: [out]
    input_scale: as for `quantize_rows`
    Returns [rows, out] of x's dtype, rounded once.
    """
    quantized, row_scales = quantize_rows(x, input_scale)
    return scale_products(F.linear(quantized.float(), weight.float()), row_scales, scales, bias, x.dtype)


def scale_products(
    products: torch.Tensor,
    row_scales: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What is left to do with the sums of products, float32 [rows, out], which are overwritten."""
    products.mul_(row_scales[:, None]).mul_(scales)
    return (products if bias is None else products.add_(bias)).to(dtype)
