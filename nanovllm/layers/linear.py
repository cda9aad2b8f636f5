"""Linear layers. Several projections of one input are stored and computed as one ("fused") matrix."""

import torch
import torch.nn.functional as F
from torch import nn

# Row count for which oneDNN lays packed weights out. Decode batches are small; measured layouts for 16 and 256
# rows differ by little at any size.
PACK_ROWS = 16
# oneDNN's float32 kernels take longer for 1 to 3 rows than for 4 (Zen 4, 2 cores: 22 against 15 ms for SmolLM2-135M).
MIN_PACKED_ROWS = 4


class Linear(nn.Module):
    """y = x W^T + b for one or several projections of the same input.

    Args:
        in_features: columns of W.
        parts: output rows by the projection's name in the checkpoint, in storage order.
        bias: whether the projections have biases.
        dtype, device: of the parameters.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.parts = parts
        self.out_features = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features, dtype=dtype, device=device), False)
        self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device), False) if bias else None
        self._packed: torch.Tensor | None = None

    def part_views(self) -> dict[str, torch.Tensor]:
        """The slice of each parameter that a checkpoint tensor fills: "q_proj.weight" -> rows of `weight`."""
        views = {}
        start = 0
        for name, rows in self.parts.items():
            views[f"{name}.weight"] = self.weight.data[start : start + rows]
            if self.bias is not None:
                views[f"{name}.bias"] = self.bias.data[start : start + rows]
            start += rows
        return views

    def pack(self, keep_weight: bool = False) -> None:
        """On a CPU in float32, replace the weight by oneDNN's blocked copy, 2 to 3 times as fast as `F.linear`."""
        if can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, PACK_ROWS)
            if not keep_weight:
                self.weight.data = torch.empty(0, dtype=self.weight.dtype)

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        num_rows = x.shape[0]
        if num_rows < MIN_PACKED_ROWS:
            x = F.pad(x, (0, 0, 0, MIN_PACKED_ROWS - num_rows))
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")[:num_rows]


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN's packed float32 kernels apply: x86 builds of torch have them."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
