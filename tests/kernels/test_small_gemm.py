"""Linear layers of few rows against float64 products."""

import pytest
import torch

from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.kernels.silu_mul import silu_mul
from nanovllm.kernels.small_gemm import small_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter's dot takes its bits for integers
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative error in the 2-norm


def check(rows, n, k, dtype, bias, gemv):
    x = torch.randn((rows, k), device=DEVICE).to(dtype)
    weight = torch.randn((n, k), device=DEVICE).to(dtype)
    b = (torch.randn(n, device=DEVICE) * 30).to(dtype) if bias else None
    out = small_linear(x, weight, b, gemv=gemv)
    expected = x.double() @ weight.double().T + (b.double() if bias else 0)
    assert out.shape == (rows, n)
    assert out.dtype == dtype
    error = (out.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype]
    assert torch.equal(small_linear(x, weight, b, gemv=gemv), out)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize(("n", "k", "bias"), [(24, 64, True), (37, 576, False), (16, 3000, True)])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
def test_rows_and_odd_sizes(rows, n, k, bias, dtype):
    check(rows, n, k, dtype, bias, None)


@pytest.mark.parametrize("gemv", [True, False])
@pytest.mark.parametrize("rows", [1, 4])
def test_both_kernels(rows, gemv):
    check(rows, 30, 200, torch.float16, True, gemv)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024)])
def test_shapes_of_a_model(rows, n, k):
    check(rows, n, k, torch.bfloat16, False, None)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_overlapped_launches_give_the_same_bits(rows):
    x, norm = torch.randn((rows, 1024), device=DEVICE).bfloat16(), torch.rand(1024, device=DEVICE).bfloat16()
    shapes = ((6144, 1024), (1024, 3072))
    layers = [[torch.randn(shape, device=DEVICE).bfloat16() / 32 for shape in shapes] for _ in range(4)]

    def run(pdl):
        y, residual = x.clone(), x.clone()
        for gate_up, down in layers:
            y, residual = add_rms_norm(y, residual, norm, 1e-6, pdl=pdl)
            y = small_linear(silu_mul(small_linear(y, gate_up, pdl=pdl), pdl=pdl), down, pdl=pdl)
        return y

    expected = run(False)
    run(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(True)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)
