import dataclasses

import pytest
import torch

from nanovllm.kernels.decode_inputs import decode_inputs
from nanovllm.kernels.reference import decode_inputs as decode_inputs_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("batch", [1, 3, 64, 65, 300])
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_inputs_are_those_of_the_rows(batch, block_size):
    num_rows, max_blocks = batch + 5, 7
    rows = torch.randperm(num_rows)[:batch].to(DEVICE, torch.int32)
    lens = torch.randint(1, max_blocks * block_size + 1, (batch,)).to(DEVICE, torch.int32)
    given = torch.where(torch.rand(batch) < 0.5, -1, torch.randint(0, 2**31 - 1, (batch,))).to(DEVICE, torch.int32)
    state = (
        torch.randint(0, 2**40, (num_rows,)).to(DEVICE),
        torch.randint(0, 10**4, (num_rows, max_blocks)).to(DEVICE, torch.int32),
        torch.rand(num_rows).to(DEVICE),
        torch.randint(-(2**62), 2**62, (num_rows,)).to(DEVICE),
    )
    out = decode_inputs(rows, lens, given, *state, block_size)
    expected = decode_inputs_reference(rows, lens, given, *state, block_size)
    for field in dataclasses.fields(expected):
        actual, wanted = getattr(out, field.name), getattr(expected, field.name)
        assert actual.dtype == wanted.dtype
        assert torch.equal(actual, wanted), field.name
