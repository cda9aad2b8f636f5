"""Penalties in one pass: what each row's tokens occurred is read beside its logits, nothing else is written."""

import torch
import triton
import triton.language as tl

from nanovllm.layers.sampler import IN_PROMPT


@triton.jit(do_not_specialize=["num_rows"])
def _penalise_kernel(
    logits_ptr,
    out_ptr,
    occurrences_ptr,
    rows_ptr,
    penalties_ptr,
    num_rows,
    logits_stride,
    VOCAB: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK logits of one item of the batch."""
    item = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + item)
    repetition = tl.load(penalties_ptr + row)
    presence = tl.load(penalties_ptr + num_rows + row)
    frequency = tl.load(penalties_ptr + 2 * num_rows + row)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    x = tl.load(logits_ptr + item * logits_stride + ids, mask=inside).to(tl.float32)
    if (repetition != 1) | (presence != 0) | (frequency != 0):
        occurrences = tl.load(occurrences_ptr + row * VOCAB + ids, mask=inside, other=0)
        count = occurrences & (IN_PROMPT - 1)
        repeated = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where(occurrences != 0, repeated, x)
        x = x - count.to(tl.float32) * frequency - tl.where(count > 0, presence, 0.0)
    tl.store(out_ptr + item * VOCAB + ids, x, mask=inside)


def penalise(
    logits: torch.Tensor,
    rows: torch.Tensor,
    occurrences: torch.Tensor,
    penalties: torch.Tensor,
    block: int = 4096,
    num_warps: int = 8,
) -> torch.Tensor:
    """`sampler.penalise` in one launch; rows without penalties are copied. The last two arguments are for tuning."""
    n, vocab_size = logits.shape
    out = torch.empty((n, vocab_size), dtype=torch.float32, device=logits.device)
    _penalise_kernel[(triton.cdiv(vocab_size, block), n)](
        logits,
        out,
        occurrences,
        rows,
        penalties,
        penalties.shape[1],
        logits.stride(0),
        VOCAB=vocab_size,
        IN_PROMPT=IN_PROMPT,
        BLOCK=block,
        num_warps=num_warps,
    )
    return out
