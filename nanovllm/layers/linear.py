"""Linear layers. Several projections of one input are stored and computed as one ("fused") matrix."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.fp8_reference import fp8_linear, quantize_rows, scale_products
from nanovllm.layers.fp8 import Fp8Form, Fp8Weight, StoredFp8
from nanovllm.layers.ops import OVERLAP_ROWS, SMALL_ROWS, Ops
from nanovllm.layers.parallel import Cut, Ranks, Runs

# Row count for which oneDNN lays packed weights out. Decode batches are small; measured layouts for 16 and 256
# rows differ by little at any size.
PACK_ROWS = 16
# oneDNN's float32 kernels take longer for 1 to 3 rows than for 4 (Zen 4, 2 cores: 22 against 15 ms for SmolLM2-135M).
MIN_PACKED_ROWS = 4
MAX_SMALL_COLUMNS = 16384
MAX_SPLIT_COLUMNS = 2048


class Linear(nn.Module):
    """y = x W^T + b for one or several projections of the same input.

    Args:
        in_features: columns of W.
        parts: output rows by the projection's name in the checkpoint, in storage order.
        bias: whether the projections have biases.
        dtype, device: of the parameters.
        order: of the outputs, if another than the storage's; rows are put into it once they are loaded.
        held: by part, which rows of the checkpoint's tensor these are, where several ranks share the layer.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        order: torch.Tensor | None = None,
        held: dict[str, Runs] | None = None,
    ):
        super().__init__()
        self.parts = parts
        self.held = held
        self.in_features = in_features
        self.out_features = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features, dtype=dtype, device=device), False)
        self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device), False) if bias else None
        self._order = order
        self._quantize = False  # once the weights are there
        self._stored: StoredFp8 | None = None  # what a checkpoint in float8 fills, in the place of `weight`
        self.fp8: Fp8Weight | None = None
        self._fp8_linear: Callable[..., torch.Tensor] | None = None
        self._fp8_split_linear: Callable[..., torch.Tensor] | None = None
        self._packed: torch.Tensor | None = None
        self._small_linear: Callable[..., torch.Tensor] | None = None
        self._split_linear: Callable[..., torch.Tensor] | None = None

    def use_fp8(self, form: Fp8Form | None) -> None:
        """Before loading: the weights will be in float8, in a checkpoint's form or (None) quantised by `optimize`."""
        self._quantize = form is None
        if form is not None:
            self._stored = StoredFp8.allocate(form, self.parts, self.weight.shape[1], self.weight.device)
            self.weight.data = self.weight.data.new_empty(0)

    def part_views(self) -> dict[str, torch.Tensor]:
        """The slice of each parameter that a checkpoint tensor fills: "q_proj.weight" -> rows of `weight`."""
        views = {}
        start = 0
        for name, rows in self.parts.items():
            if self._stored is None:
                views[f"{name}.weight"] = self.weight.data[start : start + rows]
            if self.bias is not None:
                views[f"{name}.bias"] = self.bias.data[start : start + rows]
            start += rows
        return views if self._stored is None else {**views, **self._stored.views()}

    def part_cuts(self) -> dict[str, Cut]:
        """What of each checkpoint tensor goes into its view; tensors that are not here go whole."""
        cuts = {}
        for name, runs in (self.held or {}).items():
            cuts[f"{name}.weight"] = Cut((runs.total, self.in_features), 0, runs.pieces)
            cuts[f"{name}.bias"] = Cut((runs.total,), 0, runs.pieces)
        return cuts

    def optimize(self, ops: Ops, keep_weight: bool = False) -> None:
        """After loading: put rows in order and take the fastest form, or float8 where `use_fp8` asked for it.

        On a CPU in float32 the weight is replaced by oneDNN's blocked copy, 2 to 3 times as fast as `F.linear`. On a
        GPU, few rows go to `ops.small_linear` where it is faster than cuBLAS.
        """
        if self._stored is not None:
            self.fp8, self._stored = self._stored.finish(), None
        if self._order is not None:
            order = self._order.to(self.weight.device)
            for parameter in self.parameters():
                parameter.data = parameter.data[order] if parameter.numel() else parameter.data
            self.fp8 = self.fp8.ordered(order) if self.fp8 is not None else None
        if self._quantize:
            self.fp8 = Fp8Weight.quantize(self.weight.data)
            self.weight.data = self.weight.data.new_empty(0)
        if self.fp8 is not None:
            self._optimize_fp8(self.fp8, ops)
            return
        self._small_linear, self._split_linear = ops.small_linear, ops.split_linear
        if can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, PACK_ROWS)
            if not keep_weight:
                self.weight.data = torch.empty(0, dtype=self.weight.dtype)

    def _optimize_fp8(self, weight: Fp8Weight, ops: Ops) -> None:
        """With the plain-torch operations a CPU gets the same numbers in float32: its matrix kernels know no float8."""
        self._fp8_linear, self._fp8_split_linear = ops.fp8_linear, ops.fp8_split_linear
        if weight.values.device.type == "cpu" and ops.fp8_linear is fp8_linear:
            weight.values = weight.values.float()
            if can_pack(weight.values):
                self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.values, PACK_ROWS)
                weight.values = torch.empty(0)

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fp8 is not None:
            return self._forward_fp8(x, self.fp8)
        if self._packed is None:
            if self._small_linear is not None and small_linear_pays(x.shape[0], self.weight.shape[0]):
                return self._small_linear(x, self.weight, self.bias)
            return F.linear(x, self.weight, self.bias)
        return packed_linear(x, self._packed, self.bias)

    def _forward_fp8(self, x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
        if self._packed is None:
            assert self._fp8_linear is not None
            return self._fp8_linear(x, weight.values, weight.scales, self.bias, weight.input_scale)
        quantized, row_scales = quantize_rows(x, weight.input_scale)
        products = packed_linear(quantized.float(), self._packed, None)
        return scale_products(products, row_scales, weight.scales, self.bias, x.dtype)

    def parts_of(self, x: torch.Tensor) -> torch.Tensor:
        """The same for a reader that adds parts up (`RMSNorm.add`): [T, out], or float32 [parts, T, out] if faster."""
        rows, columns = x.shape
        if self.fp8 is not None:
            split = self._fp8_split_linear
            if split is None or self.bias is not None or not fp8_split_pays(rows, self.out_features, columns):
                return self(x)
            return split(x, self.fp8.values, self.fp8.scales, self.fp8.input_scale)
        if (
            self._split_linear is None
            or self.bias is not None
            or small_linear_pays(rows, self.out_features)
            or not split_pays(rows, self.out_features, columns)
        ):
            return self(x)
        return self._split_linear(x, self.weight)


class RowLinear(Linear):
    """A projection of which each rank has some columns: the ranks' results are added up. Rank 0 adds the bias."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
    ):
        super().__init__(in_features, parts, bias, dtype, device)
        self._ranks = ranks

    def part_cuts(self) -> dict[str, Cut]:
        (name, rows), runs = *self.parts.items(), self._ranks.runs(self.in_features * self._ranks.size)
        return {f"{name}.weight": Cut((rows, runs.total), 1, runs.pieces)}

    def optimize(self, ops: Ops, keep_weight: bool = False) -> None:
        super().optimize(ops, keep_weight)
        if self._ranks.rank:
            self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ranks.all_reduce(super().forward(x))

    def parts_of(self, x: torch.Tensor) -> torch.Tensor:
        """One part: the sum over ranks is one over parts too."""
        return self(x)


def row_linear(
    in_features: int, parts: dict[str, int], bias: bool, dtype: torch.dtype, device: torch.device, ranks: Ranks
) -> Linear:
    """One projection; `in_features` are this rank's."""
    if ranks.size == 1:
        return Linear(in_features, parts, bias, dtype, device)
    return RowLinear(in_features, parts, bias, dtype, device, ranks)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """By oneDNN, on its own form of a weight."""
    num_rows = x.shape[0]
    if num_rows < MIN_PACKED_ROWS:
        x = F.pad(x, (0, 0, 0, MIN_PACKED_ROWS - num_rows))
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")[:num_rows]


def split_pays(rows: int, out_features: int, in_features: int) -> bool:
    """Measured on an H200: few columns leave cuBLAS with few tiles. 16-byte rows are what hardware tile loads need."""
    return rows <= OVERLAP_ROWS and out_features <= MAX_SPLIT_COLUMNS and in_features >= 1024 and in_features % 8 == 0


def fp8_split_pays(rows: int, out_features: int, in_features: int) -> bool:
    """As for 16 bits; with more columns where the parts are small beside the weights."""
    if not SMALL_ROWS < rows <= OVERLAP_ROWS or in_features < 1024:
        return False
    return out_features <= MAX_SPLIT_COLUMNS or (out_features <= 4 * MAX_SPLIT_COLUMNS and rows * 64 <= in_features)


def small_linear_pays(rows: int, out_features: int) -> bool:
    """Measured on an H200; many columns (an LM head) fill the GPU in cuBLAS too."""
    return rows <= 2 or (rows <= SMALL_ROWS and out_features <= MAX_SMALL_COLUMNS)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN's packed float32 kernels apply: x86 builds of torch have them."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
