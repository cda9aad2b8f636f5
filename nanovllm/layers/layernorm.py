"""RMS normalisation, alone or fused with the residual sum before it."""

import torch
from torch import nn

from nanovllm.layers.ops import Ops


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension (Zhang and Sennrich, 2019).

    Args:
        dtype: of the weights. float32 where inputs are not: the product with them is rounded, not what goes into it.
        offset: what is added to the checkpoint's weights, once they are loaded.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device, ops: Ops, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), False)
        self.eps = eps
        self._ops = ops
        self._offset = offset

    def finish_loading(self) -> None:
        """Take in the offset; the sum is rounded to the weights' dtype."""
        if self._offset:
            self.weight.data = (self.weight.data.float() + self._offset).to(self.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); x as `Linear.parts_of` returns it."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
