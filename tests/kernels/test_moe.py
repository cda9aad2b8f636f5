"""Experts: routing, the grouped GEMMs and the sum that the norm makes, against plain torch."""

import pytest
import torch

from nanovllm.kernels import moe_reference, reference
from nanovllm.kernels.moe import MoEConfig, Tile, moe
from nanovllm.kernels.moe_routing import max_tiles, route
from nanovllm.kernels.rms_norm import add_rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter's dot takes its bits for integers
EXPERTS = 12


def uniform(rows):
    """Logits that are far enough apart for one order in any arithmetic."""
    return torch.rand(rows, EXPERTS, device=DEVICE).argsort(-1) * 0.5


def same_experts(rows):
    """Every token chooses experts 3, 0 and 7; nine have none."""
    return uniform(rows) + 50 * torch.eye(EXPERTS, device=DEVICE)[[3, 0, 7]].sum(0)


def crowded(rows):
    """Expert 11 takes part in every token, the two others are drawn; expert 0 gets one token."""
    logits = uniform(rows)
    logits[:, 11] = 8
    logits[:, 0] = -50
    logits[rows // 2, 0] = 50
    return logits


ROUTINGS = [uniform, same_experts, crowded]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("draw", "rows"), [(uniform, 1), (uniform, 16), (same_experts, 17), (uniform, 100), (crowded, 100), (crowded, 1100)]
)
def test_routing(draw, rows, normalize):
    """Pairs in order of expert and token, tiles that cover each exactly once and never mix experts."""
    logits = draw(rows)
    expected_weights, expected = moe_reference.route(logits, 3, normalize)
    routing = route(logits, 3, normalize, block_m=16)
    torch.testing.assert_close(routing.weights.view(rows, 3), expected_weights, rtol=1e-5, atol=1e-7)
    assert torch.equal(routing.pairs.long(), expected.flatten().argsort(stable=True))
    by_expert = expected.flatten()[routing.pairs.long()]
    covered = []
    for expert, first, count in routing.tiles.tolist():
        assert 0 <= count <= 16
        if count:
            assert (by_expert[first : first + count] == expert).all()
            covered += range(first, first + count)
    assert covered == list(range(3 * rows))
    assert len(routing.tiles) == max_tiles(3 * rows, EXPERTS, 16)


def test_ties_go_to_the_first_expert():
    weights, pairs, tiles = route(torch.zeros(2, 5, device=DEVICE), 2, True, 16)
    assert weights.tolist() == [0.5] * 4
    assert pairs.tolist() == [0, 2, 1, 3]
    assert [tile[:2] for tile in tiles.tolist() if tile[2]] == [[0, 0], [1, 2]]


@pytest.mark.parametrize("rows", [3, 40])
def test_a_row_of_nan_does_not_touch_the_others(rows):
    x, logits, *weights = layer(rows, 24, 16, torch.float32, uniform)
    logits[1] = float("nan")
    out = moe(x, logits, *weights, 3, True).sum(0)
    good = [row for row in range(rows) if row != 1]
    expected = moe_reference.moe(x[good], logits[good], *weights, 3, True)
    torch.testing.assert_close(out[good], expected, rtol=1e-5, atol=1e-5)


def layer(rows, hidden, intermediate, dtype, draw):
    def matrix(*shape):
        return (torch.randn(shape, device=DEVICE) * (2 / shape[-1] ** 0.5)).to(dtype)

    x = torch.randn(rows, hidden, device=DEVICE).to(dtype)
    return x, draw(rows), matrix(EXPERTS, 2 * intermediate, hidden), matrix(EXPERTS, hidden, intermediate)


def check(parts, x, logits, gate_up, down, top_k, normalize):
    """`parts` against the reference in float32, up to three roundings of their dtype."""
    expected = moe_reference.moe(x.float(), logits, gate_up.float(), down.float(), top_k, normalize)
    error = (parts.float().sum(0) - expected).norm() / expected.norm()
    assert error < max(3 * torch.finfo(parts.dtype).eps, 2e-6)  # a GPU's exp is good for 22 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("hidden", "intermediate"), [(32, 40), (40, 72)])
@pytest.mark.parametrize(("draw", "rows"), [(uniform, 1), (same_experts, 7), (crowded, 20)])
def test_layer(draw, rows, hidden, intermediate, dtype):
    args = layer(rows, hidden, intermediate, dtype, draw)
    parts = moe(*args, 3, True)
    assert parts.shape == (3, rows, hidden)
    assert parts.dtype == dtype
    check(parts, *args, 3, True)
    assert torch.equal(moe(*args, 3, True), parts)


@pytest.mark.parametrize("rows", [30, 90, 300])
def test_the_chosen_tiles(rows):
    args = layer(rows, 128, 64, torch.float16, crowded)
    check(moe(*args, 3, False), *args, 3, False)


def test_given_tiles():
    args = layer(33, 64, 48, torch.float16, crowded)
    config = MoEConfig(16, Tile(32, 32, 4, 2), Tile(16, 64, 4, 2))
    check(moe(*args, 3, True, config), *args, 3, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_adds_parts_up(dtype):
    parts, residual, weight = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((8, 5, 72), (5, 72), (72,)))
    x = parts.float().sum(0).to(dtype)
    expected, total = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    out, total_out = add_rms_norm(parts, residual, weight, 1e-6)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(total_out, total, rtol=2 * rounding, atol=2 * rounding)
    torch.testing.assert_close(out, expected, rtol=4 * rounding, atol=4 * rounding)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("draw", ROUTINGS)
def test_reference(draw, normalize):
    """One token and expert at a time, in double precision."""
    x, logits, gate_up, down = layer(9, 24, 16, torch.float32, draw)
    expected = torch.zeros(9, 24, dtype=torch.float64, device=DEVICE)
    for token in range(9):
        probabilities = logits[token].double().softmax(-1)
        chosen = sorted(range(EXPERTS), key=lambda e: -probabilities[e])[:3]
        scale = probabilities[chosen].sum() if normalize else 1
        for expert in chosen:
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            inner = gate * torch.sigmoid(gate) * up
            expected[token] += probabilities[expert] / scale * (down[expert].double() @ inner)
    out = moe_reference.moe(x, logits, gate_up, down, 3, normalize)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 256, 1500])
def test_shapes_of_a_model(rows):
    """Qwen3-30B-A3B's layer with a quarter of the experts, in a graph with overlapping launches."""
    shapes = ((rows, 2048), (rows, 32), (32, 1536, 2048), (32, 2048, 768))
    x, logits, gate_up, down = (torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes)
    args = (x, logits, gate_up / 32, down / 16, 8, True)
    moe(*args, pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = moe(*args, pdl=True)
    for _ in range(3):
        parts.fill_(float("nan"))
        graph.replay()
        check(parts, *args)
