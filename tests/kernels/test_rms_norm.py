"""RMS norm: the kernel against its reference, and the reference against transformers."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from nanovllm.kernels import reference, rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# A sum in another order moves the scale by one rounding of float32, and so a result by one rounding of its type.
# The interpreter cuts bfloat16 off instead of rounding it: up to three times the error.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3 if DEVICE == "cuda" else 2.4e-2}
EPS = 1e-5


def draw(*shape, dtype):
    return (torch.randn(shape, device=DEVICE) * 3).to(dtype)


def close(actual, expected):
    assert actual.dtype == expected.dtype
    rounding = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 1), (1, 576), (3, 1024), (7, 1000), (2, 16384)])
class TestKernel:
    def test_rms_norm(self, num_tokens, hidden, dtype):
        x, weight = draw(num_tokens, hidden, dtype=dtype), draw(hidden, dtype=dtype)
        before = x.clone()
        out = rms_norm.rms_norm(x, weight, EPS)
        close(out, reference.rms_norm(x, weight, EPS))
        assert torch.equal(x, before)

    def test_add_rms_norm(self, num_tokens, hidden, dtype):
        x, residual = draw(num_tokens, hidden, dtype=dtype), draw(num_tokens, hidden, dtype=dtype)
        weight, before, total = draw(hidden, dtype=dtype), x.clone(), x + residual
        expected, _ = reference.add_rms_norm(x, residual.clone(), weight, EPS)
        out, new_residual = rms_norm.add_rms_norm(x, residual, weight, EPS)
        close(out, expected)
        close(new_residual, total)
        assert new_residual.data_ptr() == residual.data_ptr()
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_transformers(dtype):
    norm = LlamaRMSNorm(576, eps=EPS).to(DEVICE, dtype)
    norm.weight.data.copy_(draw(576, dtype=dtype))
    x, residual = draw(5, 576, dtype=dtype), draw(5, 576, dtype=dtype)
    close(reference.rms_norm(x, norm.weight.data, EPS), norm(x).detach())
    total = x + residual
    out, new_residual = reference.add_rms_norm(x, residual, norm.weight.data, EPS)
    close(out, norm(total).detach())
    assert torch.equal(new_residual, total)


def test_eps_counts_for_tiny_rows():
    x, weight = torch.full((2, 64), 1e-4, device=DEVICE), torch.ones(64, device=DEVICE)
    expected = torch.full_like(x, 1e-4 / (1e-8 + 1e-6) ** 0.5)
    torch.testing.assert_close(rms_norm.rms_norm(x, weight, 1e-6), expected)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_weights_are_multiplied_before_the_one_rounding(dtype):
    norm = Olmo2RMSNorm(300, eps=EPS).to(DEVICE)
    norm.weight.data.copy_(draw(300, dtype=torch.float32))
    x = draw(5, 300, dtype=dtype)
    expected = norm(x).detach()
    close(reference.rms_norm(x, norm.weight.data, EPS), expected)
    close(rms_norm.rms_norm(x, norm.weight.data, EPS), expected)
    if dtype == torch.float16:  # the interpreter rounds it as a GPU does: all but a rare value at a rounding's edge
        assert (rms_norm.rms_norm(x, norm.weight.data, EPS) == expected).float().mean() > 0.99
