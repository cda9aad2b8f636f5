"""The draw where each rank has the logits of some token ids only.

Every rank ends with the same tokens, bit for bit, since each looks the next embeddings up by what it keeps itself.
"""

import torch

from nanovllm.engine.draw import Drawer, Drawn, Send
from nanovllm.engine.step import RowState, StepInput
from nanovllm.layers.ops import Ops
from nanovllm.layers.parallel import Ranks
from nanovllm.models.decoder import DecoderForCausalLM


def sample_over_ranks(
    ranks: Ranks,
    ops: Ops,
    vocab_size: int,
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Token ids [n] int64 that `Ops.gumbel_sample` would draw from all ranks' logits.

    Each rank draws among its own ids; what they exchange is 8 bytes a row. The noise is a function of seed, position
    and token id, so that it does not matter who adds it.

    Args:
        logits: [n, columns] of this rank's token ids.
        temperatures, seeds, positions: [n], as for `Ops.gumbel_sample`.
    """
    first, end = ranks.vocab(vocab_size)
    scores, tokens = ops.gumbel_best(logits, temperatures, seeds, positions, first, end - first)
    pairs = ranks.all_gather(torch.stack([scores.view(torch.int32), tokens.int()]))  # [ranks, 2, n]
    winners = pairs[:, 0].view(torch.float32).argmax(0, keepdim=True)  # of equal scores the first: the lowest id
    return pairs[:, 1].gather(0, winners)[0].long()


class RankDrawer(Drawer):
    """Draws over the ranks' shares where temperature and seed are all there is; else rank 0 draws from all logits."""

    def __init__(self, rows: RowState, ops: Ops, model: DecoderForCausalLM):
        super().__init__(rows, ops, model.spec.vocab_size)
        self._model = model

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        inputs: StepInput,
        send: Send,
        previous: torch.Tensor | None = None,
    ) -> Drawn:
        """As `Drawer.draw`; logits: [n, columns] of this rank's token ids. Log-probabilities come on rank 0."""
        state, model = self._rows, self._model
        if inputs.is_plain:
            params = (state.temperatures[rows], state.seeds[rows], positions)
            tokens = sample_over_ranks(model.ranks, self._ops, model.spec.vocab_size, logits, *params)
            state.last_tokens[rows] = tokens
            return tokens, None
        whole = model.gather_logits(logits)
        if whole is not None:
            tokens, logprobs = super().draw(whole, rows, positions, inputs, send, previous)
        else:
            tokens, logprobs = torch.empty_like(positions), None
        tokens = tokens.contiguous()
        model.ranks.broadcast(tokens)
        state.last_tokens[rows] = tokens
        return tokens, logprobs
