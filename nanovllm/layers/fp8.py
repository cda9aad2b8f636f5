"""Weights of linear layers in float8: quantised here, or as a checkpoint has them."""

from dataclasses import dataclass, field

import torch

from nanovllm.kernels import fp8_reference
from nanovllm.kernels.reference import FP8

MULTIPLE = 16  # of rows and columns, for the scaled GEMM of a GPU


@dataclass
class Fp8Weight:
    """Rows of `values` times `scales`; tokens are brought to float8 on the way in."""

    values: torch.Tensor  # [out, in] float8
    scales: torch.Tensor  # [out] float32
    input_scale: torch.Tensor | None = None  # [1] float32, of all tokens; None: each token has its own

    @classmethod
    def quantize(cls, weight: torch.Tensor) -> "Fp8Weight":
        """Of a weight [out, in] in any float type, with a scale per row.

        Raises:
            ValueError: sizes that a GPU's scaled GEMM does not take.
        """
        if any(size % MULTIPLE for size in weight.shape):
            raise ValueError(f"float8 needs layers whose sizes are multiples of {MULTIPLE}, not {list(weight.shape)}")
        return cls(*fp8_reference.quantize_weight(weight))

    def ordered(self, order: torch.Tensor) -> "Fp8Weight":
        """With the rows in another order."""
        values = self.values.view(torch.uint8)[order].view(FP8)
        return Fp8Weight(values, self.scales[order], self.input_scale)


@dataclass(frozen=True)
class Fp8Form:
    """How a checkpoint stores a float8 weight beside its scales."""

    block: tuple[int, int] | None = None  # rows and columns that share a scale; None: per tensor or per row
    static_inputs: bool = False  # it has the scale of the layer's input as well

    @property
    def scale_name(self) -> str:
        return "weight_scale" if self.block is None else "weight_scale_inv"


@dataclass
class StoredFp8:
    """What a checkpoint's tensors fill: the parts of one linear layer, one after the other.

    Scales of parts and of tensors become those of their rows. Of blocks they do not: such a weight is quantised anew.
    """

    form: Fp8Form
    parts: dict[str, int]
    values: torch.Tensor  # [out, in] float8
    scales: torch.Tensor  # [out] float32
    input_scales: torch.Tensor  # [number of parts] float32
    block_scales: dict[str, torch.Tensor] = field(default_factory=dict)  # of each part, [blocks of rows, of columns]

    @classmethod
    def allocate(cls, form: Fp8Form, parts: dict[str, int], columns: int, device: torch.device) -> "StoredFp8":
        rows = sum(parts.values())
        values = torch.empty(rows, columns, dtype=FP8, device=device)
        scales = torch.empty(rows, device=device)
        stored = cls(form, parts, values, scales, torch.empty(len(parts), device=device))
        if form.block is not None:
            high, wide = form.block
            for name, count in parts.items():
                stored.block_scales[name] = torch.empty(-(-count // high), -(-columns // wide), device=device)
        return stored

    def views(self) -> dict[str, torch.Tensor]:
        """By the tensors' names in a checkpoint, the parts' own as a prefix."""
        views, start = {}, 0
        for i, (name, rows) in enumerate(self.parts.items()):
            views[f"{name}.weight"] = self.values[start : start + rows]
            scales = self.scales[start : start + rows] if self.form.block is None else self.block_scales[name]
            views[f"{name}.{self.form.scale_name}"] = scales
            if self.form.static_inputs:
                views[f"{name}.input_scale"] = self.input_scales[i : i + 1]
            start += rows
        return views

    def finish(self) -> Fp8Weight:
        """Once all is loaded. Parts see the same input: of their scales for it the largest holds for all."""
        input_scale = self.input_scales.max().view(1) if self.form.static_inputs else None
        if self.form.block is None:
            return Fp8Weight(self.values, self.scales, input_scale)
        values = self.values.split(list(self.parts.values()))
        dense = [
            dequantize_blocks(part, self.block_scales[name], self.form.block)
            for name, part in zip(self.parts, values, strict=True)
        ]
        weight = Fp8Weight.quantize(torch.cat(dense))
        weight.input_scale = input_scale
        return weight


def dequantize_blocks(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[rows, columns] float32 from float8 and one scale a block; the last blocks may be cut."""
    rows, columns = values.shape
    wide = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return values.float().mul_(wide)
