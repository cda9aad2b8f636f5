"""Penalties, as a kernel and in plain torch, against plain Python."""

import pytest
import torch

from nanovllm.kernels.penalties import penalise
from nanovllm.layers import sampler
from nanovllm.layers.sampler import IN_PROMPT
from tests.kernels.test_sampling import DEVICE

PROMPTS = [[1, 2, 2], [5], [7, 8], [3]]
COMPLETIONS = [[2, 3, 3, 3], [], [9], [4, 4]]
PENALTIES = [(1.5, 0.5, 0.25), (2.0, 0.0, 0.0), (1.0, -1.0, 2.0), (1.0, 0.0, 0.0)]


@pytest.mark.parametrize("function", [penalise, sampler.penalise])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [30, 5003])
def test_penalties_equal_a_plain_loop(function, dtype, columns):
    """The rows of a batch are in an order of their own, and one of the table's is not in it."""
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(4, columns, generator=generator).to(DEVICE, dtype)
    logits[2, 9] = float("-inf")
    occurrences = torch.full((6, columns), 77, dtype=torch.int32, device=DEVICE)
    penalties = torch.full((3, 6), 9.0, device=DEVICE)
    rows = [3, 0, 5, 1]
    for row, prompt, completion, values in zip(rows, PROMPTS, COMPLETIONS, PENALTIES, strict=True):
        occurrences[row] = 0
        occurrences[row, prompt] = IN_PROMPT
        for token in completion:
            occurrences[row, token] += 1
        penalties[:, row] = torch.tensor(values)
    before = logits.clone()
    out = function(logits, torch.tensor(rows, device=DEVICE), occurrences, penalties)
    assert torch.equal(logits, before)
    assert out.dtype == torch.float32
    expected = logits.double()
    for i, (repetition, presence, frequency) in enumerate(PENALTIES):
        for token in {*PROMPTS[i], *COMPLETIONS[i]}:
            value = float(expected[i, token])
            value = value / repetition if value > 0 else value * repetition
            count = COMPLETIONS[i].count(token)
            expected[i, token] = value - frequency * count - presence * (count > 0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out[3], logits[3].float())
