"""Linear layers in float8 against their reference, and the reference against float64 products of what it quantised."""

import pytest
import torch

from nanovllm.kernels import fp8_linear as kernels
from nanovllm.kernels import fp8_reference as reference
from nanovllm.kernels.fp8_split_gemm import fp8_split_linear
from nanovllm.kernels.reference import FP8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative error in the 2-norm


def make_x(rows, columns, dtype):
    """Rows of different sizes, one of zeros, one with an outlier."""
    x = torch.randn(rows, columns, device=DEVICE) * torch.logspace(-3, 0, rows, device=DEVICE)[:, None]
    x[0, 0] *= 300
    if rows > 2:
        x[1] = 0
    return x.to(dtype)


def make_layer(out, columns, bias, dtype):
    weight = torch.randn(out, columns, device=DEVICE) * torch.rand(out, 1, device=DEVICE)
    return *reference.quantize_weight(weight), torch.randn(out, device=DEVICE).to(dtype) if bias else None


def relative(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("quantize", [reference.quantize_rows, kernels.quantize_rows])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_use_the_whole_range(quantize, dtype):
    x = make_x(7, 48, dtype)
    values, scales = quantize(x)
    assert values.dtype == FP8
    largest = values.float().abs().amax(1)
    assert largest.tolist() == [448, 0, *[448] * 5]
    error = (values.double() * scales[:, None] - x.double()).abs()
    step = torch.maximum(x.double().abs() / 16, scales[:, None] * 2**-10)  # half a step of 3 bits, and of subnormals
    assert (error <= step * 1.001).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16, 40, 576, 3000])
@pytest.mark.parametrize("static", [False, True])
def test_the_kernel_quantises_as_the_reference(dtype, columns, static):
    x = make_x(9, columns, dtype)
    input_scale = torch.tensor([0.002], device=DEVICE) if static else None
    expected, actual = reference.quantize_rows(x, input_scale), kernels.quantize_rows(x, input_scale)
    assert torch.equal(actual[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(actual[1], expected[1])
    assert not static or (expected[0].float().abs().max() == 448 and expected[1].tolist() == [pytest.approx(0.002)] * 9)


def test_nan_is_not_hidden():
    x = make_x(3, 64, torch.float32)
    x[2, 5] = float("nan")
    for quantize in (reference.quantize_rows, kernels.quantize_rows):
        values, scales = quantize(x)
        assert (values.float() * scales[:, None])[2].isnan().any()
        assert not (values.float() * scales[:, None])[:2].isnan().any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_the_reference_is_the_product_of_what_is_quantised(bias, static):
    x = make_x(6, 64, torch.float32)
    weight, scales, b = make_layer(32, 64, bias, torch.float32)
    input_scale = torch.tensor(0.5, device=DEVICE) if static else None
    values, row_scales = reference.quantize_rows(x, input_scale)
    dense = weight.double() * scales.double()[:, None]
    expected = values.double() * row_scales.double()[:, None] @ dense.T + (b.double() if bias else 0)
    assert relative(reference.fp8_linear(x, weight, scales, b, input_scale), expected) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "columns", "bias"), [(24, 64, True), (48, 576, False), (16, 3008, True)])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
def test_few_rows(rows, out, columns, bias, dtype):
    x = make_x(rows, columns, dtype)
    layer = make_layer(out, columns, bias, dtype)
    y = kernels.fp8_linear(x, *layer)
    assert y.dtype == dtype
    assert relative(y, reference.fp8_linear(x.double().float(), *layer)) < TOLERANCE[dtype]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("rows", "out", "columns"), [(17, 48, 64), (100, 16, 304), (3, 16400, 32)])
def test_the_scaled_gemm_of_torch(rows, out, columns, static, bias):
    """More rows, or outputs, than our own kernel is for."""
    x = make_x(rows, columns, torch.bfloat16)
    layer = make_layer(out, columns, bias, torch.bfloat16)
    input_scale = torch.tensor([0.5], device=DEVICE) if static else None
    assert relative(kernels.fp8_linear(x, *layer, input_scale), reference.fp8_linear(x, *layer, input_scale)) < 8e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "out", "columns"), [(17, 48, 1024), (70, 130, 400), (3, 64, 2064)])
def test_parts_add_up(rows, out, columns, dtype):
    x = make_x(rows, columns, dtype)
    weight, scales, _ = make_layer(out, columns, False, dtype)
    parts = fp8_split_linear(x, weight, scales)
    assert parts.dtype == torch.float32
    assert parts.shape[0] > 1
    tolerance = 1e-6 if DEVICE == "cpu" else 1e-3  # the tensor cores keep fewer bits of sums of float8 products
    assert relative(parts.sum(0), reference.fp8_linear(x.float(), weight, scales)) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 100, 256, 2000])
@pytest.mark.parametrize(("out", "columns"), [(4096, 1024), (1024, 2048), (6144, 5120), (34816, 5120), (896, 4864)])
def test_shapes_of_models(rows, out, columns, static, bias):
    x = make_x(rows, columns, torch.bfloat16)
    layer = make_layer(out, columns, bias, torch.bfloat16)
    input_scale = torch.tensor([0.5], device=DEVICE) if static else None
    y = kernels.fp8_linear(x, *layer, input_scale)
    expected = reference.fp8_linear(x, *layer, input_scale)
    assert relative(y, expected) < 8e-3
    if not bias and rows <= 256:
        parts = fp8_split_linear(x, *layer[:2], input_scale)
        assert relative(parts.sum(0), expected) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_overlapped_launches_give_the_same_bits(rows):
    x = torch.randn(rows, 1024, device=DEVICE).bfloat16()
    layers = [[make_layer(*shape, True, torch.bfloat16) for shape in ((4096, 1024), (1024, 4096))] for _ in range(4)]

    def run(pdl):
        y = x
        for up, down in layers:
            y = kernels.fp8_linear(kernels.fp8_linear(y, *up, pdl=pdl), *down, pdl=pdl)
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
