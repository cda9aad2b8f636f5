"""silu(gate) * up: the kernel against its reference, and the reference against a plain computation."""

import pytest
import torch

from nanovllm.kernels import reference
from nanovllm.kernels.silu_mul import silu_mul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # two roundings of the type


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "intermediate"), [(1, 3), (1, 1536), (5, 1000), (3, 3072), (17, 128)])
def test_kernel(num_tokens, intermediate, dtype):
    gate_up = (torch.randn((num_tokens, 2 * intermediate), device=DEVICE) * 4).to(dtype)
    before = gate_up.clone()
    out, expected = silu_mul(gate_up), reference.silu_mul(gate_up)
    assert out.dtype == dtype
    rounding = TOLERANCE[dtype]
    torch.testing.assert_close(out.float(), expected.float(), rtol=rounding, atol=rounding)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference(dtype):
    gate_up = (torch.randn((6, 2 * 300), device=DEVICE) * 4).to(dtype)
    gate, up = gate_up[:, :300].double(), gate_up[:, 300:].double()
    expected = gate * torch.sigmoid(gate) * up
    rounding = TOLERANCE[dtype]
    torch.testing.assert_close(reference.silu_mul(gate_up).double(), expected, rtol=rounding, atol=rounding)


def test_large_gates_stay_finite():
    gate_up = torch.tensor([[-200.0, 200.0, 2.0, 2.0]], device=DEVICE)
    for compute in (silu_mul, reference.silu_mul):
        torch.testing.assert_close(compute(gate_up), torch.tensor([[0.0, 400.0]], device=DEVICE))
