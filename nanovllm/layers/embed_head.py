"""Token embedding and the language-model head, which may share one matrix."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops


class Embedding(nn.Module):
    """Rows of `weight` [vocab_size, hidden_size] by token id."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=device), False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)


class LMHead(Linear):
    """Hidden states [n, hidden_size] to logits [n, vocab_size]; `tied_to` shares the embedding's matrix."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: Embedding | None = None,
    ):
        rows = {} if tied_to else {"lm_head": vocab_size}
        super().__init__(hidden_size, rows, False, dtype, device)
        self.tied = tied_to is not None
        if tied_to is not None:
            self.weight = tied_to.weight

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The same into a given buffer [n, vocab_size]."""
        return torch.mm(hidden, self.weight.t(), out=out)

    def optimize(self, ops: Ops, keep_weight: bool = False) -> None:
        super().optimize(ops, keep_weight=self.tied)  # the embedding still looks rows up in it
