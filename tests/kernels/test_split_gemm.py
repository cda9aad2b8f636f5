"""Linear layers whose inner dimension is split, and the norm that adds the parts up."""

import pytest
import torch

from nanovllm.kernels import reference
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.kernels.silu_mul import silu_mul
from nanovllm.kernels.split_gemm import split_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter's dot takes its bits for integers


def draw(*shape, dtype):
    return (torch.randn(shape, device=DEVICE) / shape[-1] ** 0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize(("n", "k", "parts"), [(24, 1032, 5), (130, 1024, 8), (64, 200, 2)])
@pytest.mark.parametrize("rows", [1, 33, 70])
def test_parts_add_up_to_the_product(rows, n, k, parts, dtype):
    x, weight = draw(rows, k, dtype=dtype) * 8, draw(n, k, dtype=dtype) * 8
    out = split_linear(x, weight, (32, parts, 3))
    assert out.shape == (parts, rows, n)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double().sum(0), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
    assert torch.equal(split_linear(x, weight, (32, parts, 3)), out)


@pytest.mark.parametrize("rows", [17, 33, 129])
def test_the_chosen_tiles(rows):
    x, weight = draw(rows, 1024, dtype=torch.float16), draw(72, 1024, dtype=torch.float16)
    out = split_linear(x, weight)
    torch.testing.assert_close(out.double().sum(0), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, BF16])
def test_norm_adds_parts_up(dtype):
    parts = torch.randn((4, 5, 72), device=DEVICE)
    residual, weight = draw(5, 72, dtype=dtype), draw(72, dtype=dtype)
    x = (parts[0] + parts[1] + parts[2] + parts[3]).to(dtype)
    expected, total = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    out, total_out = add_rms_norm(parts, residual, weight, 1e-6)
    assert out.dtype == dtype
    assert total_out.data_ptr() == residual.data_ptr()
    assert torch.equal(total_out, total)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=2 * rounding, atol=rounding)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 32, 64, 100, 256])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (1024, 3072), (2048, 6144), (896, 4864)])
def test_shapes_of_a_model(rows, n, k):
    x, weight = draw(rows, k, dtype=torch.bfloat16) * 8, draw(n, k, dtype=torch.bfloat16) * 8
    expected = x.double() @ weight.double().T
    error = (split_linear(x, weight).double().sum(0) - expected).norm() / expected.norm()
    assert error < 5e-6  # float32 sums of thousands of terms


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [20, 64, 256])
def test_overlapped_launches_give_the_same_bits(rows):
    x, norm = draw(rows, 1024, dtype=torch.bfloat16) * 32, torch.rand(1024, device=DEVICE).bfloat16()
    shapes = ((6144, 1024), (1024, 3072))
    layers = [[draw(*shape, dtype=torch.bfloat16) for shape in shapes] for _ in range(4)]

    def run(pdl):
        y, residual = x.clone(), x.clone()
        for gate_up, down in layers:
            y, residual = add_rms_norm(y, residual, norm, 1e-6, pdl=pdl)
            y = split_linear(silu_mul(y @ gate_up.T, pdl=pdl), down, pdl=pdl)
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
