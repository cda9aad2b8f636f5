"""Token embedding and the language-model head, which may share one matrix."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops
from nanovllm.layers.parallel import Cut, Ranks


class Embedding(nn.Module):
    """Rows of `weight` [vocab_size, hidden_size] by token id."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=device), False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)

    def part_views(self) -> dict[str, torch.Tensor]:
        """What a checkpoint's tensor fills."""
        return {"weight": self.weight.data}

    def part_cuts(self) -> dict[str, Cut]:
        return {}


class ShardedEmbedding(Embedding):
    """Each rank has the rows of some token ids, and zeros after them up to the ranks' common size."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device, ranks: Ranks):
        super().__init__(ranks.padded_vocab(vocab_size), hidden_size, dtype, device)
        self._ranks = ranks
        self._vocab_size = vocab_size
        self._first, self._end = ranks.vocab(vocab_size)
        self.weight.data[self._end - self._first :] = 0

    def part_views(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight.data[: self._end - self._first]}

    def part_cuts(self) -> dict[str, Cut]:
        return {"weight": Cut((self._vocab_size, self.weight.shape[1]), 0, ((self._first, self._end),))}

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (input_ids < self._first) | (input_ids >= self._end)
        rows = F.embedding((input_ids - self._first).masked_fill_(elsewhere, 0), self.weight)
        return self._ranks.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))


def make_embedding(
    vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device, ranks: Ranks
) -> Embedding:
    if ranks.size == 1:
        return Embedding(vocab_size, hidden_size, dtype, device)
    return ShardedEmbedding(vocab_size, hidden_size, dtype, device, ranks)


class LMHead(Linear):
    """Hidden states [n, hidden_size] to logits [n, columns]; `tied_to` shares the embedding's matrix.

    Of several ranks, each has the columns of the token ids that its embedding has; the surplus ones mean nothing.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: Embedding | None,
        ranks: Ranks,
    ):
        rows = {} if tied_to else {"lm_head": ranks.padded_vocab(vocab_size)}
        super().__init__(hidden_size, rows, False, dtype, device)
        self.tied = tied_to is not None
        self._vocab_size, self._ids = vocab_size, ranks.vocab(vocab_size)
        if tied_to is not None:
            self.weight = tied_to.weight

    def part_views(self) -> dict[str, torch.Tensor]:
        first, end = self._ids
        return {name: view[: end - first] for name, view in super().part_views().items()}

    def part_cuts(self) -> dict[str, Cut]:
        first, end = self._ids
        if self.tied or end - first == self._vocab_size:
            return {}
        return {"lm_head.weight": Cut((self._vocab_size, self.weight.shape[1]), 0, (self._ids,))}

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The same into a given buffer [n, columns]."""
        return torch.mm(hidden, self.weight.t(), out=out)

    def optimize(self, ops: Ops, keep_weight: bool = False) -> None:
        super().optimize(ops, keep_weight=self.tied)  # the embedding still looks rows up in it
