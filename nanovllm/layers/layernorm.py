"""RMS normalisation, alone or fused with the residual sum before it."""

import torch
from torch import nn

from nanovllm.layers.ops import Ops
from nanovllm.layers.parallel import Cut, Runs


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


class ShardedNorm(RMSNorm):
    """A norm over a row of which this rank has a part; what the other ranks know comes as an argument."""

    def __init__(self, runs: Runs, eps: float, dtype: torch.dtype, device: torch.device, ops: Ops, offset: float = 0.0):
        super().__init__(sum(stop - start for start, stop in runs.pieces), eps, dtype, device, ops, offset)
        self._runs = runs

    def part_cuts(self) -> dict[str, Cut]:
        return {"weight": Cut((self._runs.total,), 0, self._runs.pieces)}

    def scaled(self, x: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """The norm of x [T, this rank's part]; squares: [T] float32, the sum of squares of the whole row."""
        scale = torch.rsqrt(squares / self._runs.total + self.eps)[:, None]
        return (x.float() * scale * self.weight).to(x.dtype)
