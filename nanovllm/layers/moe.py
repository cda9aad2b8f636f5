"""A mixture of experts in the place of an MLP."""

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops
from nanovllm.layers.parallel import Cut, Ranks, Runs


@dataclass(frozen=True)
class MoESpec:
    """Shapes and switches of a model's layers of experts."""

    layers: frozenset[int]  # that have experts; the others have an MLP
    num_experts: int
    top_k: int  # experts of a token
    intermediate_size: int  # of one expert
    normalize: bool  # whether the weights of a token's experts are scaled to a sum of 1


class Experts(nn.Module):
    """The matrices of all experts: gate_up [num_experts, 2 * intermediate, hidden], down [num_experts, hidden, ...].

    Checkpoints hold them expert by expert, or as these two tensors. Of several ranks, each has a share of every
    expert's intermediate dimension.
    """

    def __init__(self, hidden_size: int, spec: MoESpec, dtype: torch.dtype, device: torch.device, ranks: Ranks):
        super().__init__()
        self._ranks = ranks
        n, inner = spec.num_experts, spec.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(n, 2 * inner, hidden_size, dtype=dtype, device=device), False)
        self.down_proj = nn.Parameter(torch.empty(n, hidden_size, inner, dtype=dtype, device=device), False)

    def part_views(self) -> dict[str, torch.Tensor]:
        """The slice that each of an expert's checkpoint tensors fills."""
        views = {}
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj.data, self.down_proj.data, strict=True)):
            gate, up = gate_up.chunk(2)
            views[f"experts.{expert}.gate_proj.weight"] = gate
            views[f"experts.{expert}.up_proj.weight"] = up
            views[f"experts.{expert}.down_proj.weight"] = down
        return views

    def fused_views(self) -> dict[str, tuple[torch.Tensor, list[str]]]:
        """What a checkpoint's fused tensors fill, and the names in `part_views` that each stands for."""
        names = list(self.part_views())
        down = [name for name in names if name.endswith("down_proj.weight")]
        gate_up = [name for name in names if not name.endswith("down_proj.weight")]
        return {
            "experts.gate_up_proj": (self.gate_up_proj.data, gate_up),
            "experts.down_proj": (self.down_proj.data, down),
        }

    def part_cuts(self) -> dict[str, Cut]:
        """What of each tensor, fused or not, goes into its view."""
        if self._ranks.size == 1:
            return {}
        n, hidden, inner = self.down_proj.shape
        runs = self._ranks.runs(inner * self._ranks.size)
        both = Runs.joined([runs, runs])
        cuts = {
            "experts.gate_up_proj": Cut((n, both.total, hidden), 1, both.pieces),
            "experts.down_proj": Cut((n, hidden, runs.total), 2, runs.pieces),
        }
        for expert in range(n):
            for name in ("gate_proj", "up_proj"):
                cuts[f"experts.{expert}.{name}.weight"] = Cut((runs.total, hidden), 0, runs.pieces)
            cuts[f"experts.{expert}.down_proj.weight"] = Cut((hidden, runs.total), 1, runs.pieces)
        return cuts


class MoE(nn.Module):
    """Each token goes through the `top_k` experts that its router likes best, weighted by how much."""

    def __init__(
        self, hidden_size: int, spec: MoESpec, dtype: torch.dtype, device: torch.device, ops: Ops, ranks: Ranks
    ):
        super().__init__()
        self.gate = Linear(hidden_size, {"gate": spec.num_experts}, False, dtype, device)
        self.experts = Experts(hidden_size, spec, dtype, device, ranks)
        self._spec = spec
        self._moe = ops.moe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to the same, or to [parts, T, hidden_size] for a reader that adds up (`RMSNorm.add`)."""
        experts, spec = self.experts, self._spec
        return self._moe(x, self.gate(x), experts.gate_up_proj, experts.down_proj, spec.top_k, spec.normalize)


class ShardedMoE(MoE):
    """Every rank's router chooses the same experts, of each of which the rank has a part: the results are added up."""

    def __init__(
        self, hidden_size: int, spec: MoESpec, dtype: torch.dtype, device: torch.device, ops: Ops, ranks: Ranks
    ):
        super().__init__(hidden_size, spec, dtype, device, ops, ranks)
        self._ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return self._ranks.all_reduce(out.sum(0) if out.dim() == 3 else out)
