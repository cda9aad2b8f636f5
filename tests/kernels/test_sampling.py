"""The sampler: the kernel against its reference, the reference against softmax, and the noise's independence."""

import math

import pytest
import torch

from nanovllm.kernels import reference, sampling
from nanovllm.kernels.sampling import gumbel_sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BOTH = pytest.mark.parametrize("function", [gumbel_sample, reference.gumbel_sample])
DRAWS = 20_000
FEW = 60 if DEVICE == "cuda" else 12  # of them that the kernel repeats
Z = 4.5  # standard deviations allowed: seeds are fixed, so a pass stays a pass


def int64(values):
    return torch.as_tensor(values, dtype=torch.int64, device=DEVICE)


def make_rows(batch, columns, dtype=torch.float32):
    logits = (torch.randn((batch, columns), device=DEVICE) * 3).to(dtype)
    temperatures = torch.rand(batch, device=DEVICE) * 1.5 + 0.2
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), device=DEVICE)
    positions = torch.randint(0, 2**20, (batch,), device=DEVICE)
    return logits, temperatures, seeds, positions


def plain_scores(logits, temperatures, seeds, positions):
    noise = reference.gumbel_noise(seeds, positions, logits.shape[1])
    greedy = (temperatures < 1e-5)[:, None]
    return torch.where(greedy, logits.float(), logits.float() / temperatures[:, None] + noise)


def check(tokens, scores):
    """Each token has the row's highest score, or one that rounding could take for it."""
    assert tokens.dtype == torch.int64
    assert ((tokens >= 0) & (tokens < scores.shape[1])).all()
    best = scores.amax(1)
    assert (scores.gather(1, tokens[:, None])[:, 0] >= best - 1e-4 * best.abs().clamp(min=1)).all()


def chi_square_z(observed, expected):
    """Chi-square statistic as a number of standard deviations (Wilson and Hilferty, 1931)."""
    freedom = observed.numel() - 1
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "columns"), [(1, 5), (3, 1000), (4, 5003)])
def test_argmax_of_noisy_scores(function, batch, columns, dtype):
    rows = make_rows(batch, columns, dtype)
    check(function(*rows), plain_scores(*rows))


@BOTH
def test_greedy_and_drawn_rows_together(function):
    logits, temperatures, seeds, positions = make_rows(6, 777)
    temperatures[::2] = torch.tensor([0.0, 9e-6, 0.0])
    tokens = function(logits, temperatures, seeds, positions)
    assert torch.equal(tokens[::2], logits[::2].argmax(1))
    check(tokens, plain_scores(logits, temperatures, seeds, positions))


@BOTH
def test_flat_logits_make_every_id_a_candidate(function):
    rows = (torch.zeros((2, 3000), device=DEVICE), *make_rows(2, 1)[1:])
    check(function(*rows), plain_scores(*rows))


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_padded_columns_and_out(function, temperature):
    _, _, seeds, positions = make_rows(3, 1)
    padded = torch.full((3, 1100), float("nan"), device=DEVICE)[:, :1090]
    padded[:, :1050] = torch.randn(3, 1050)
    padded[:, 1050:] = 1e9
    temperatures = torch.full((3,), temperature, device=DEVICE)
    out = torch.full((3,), -1, dtype=torch.int64, device=DEVICE)
    tokens = function(padded, temperatures, seeds, positions, out=out, vocab_size=1050)
    assert tokens.data_ptr() == out.data_ptr()
    check(out, plain_scores(padded[:, :1050], temperatures, seeds, positions))


@BOTH
def test_greedy_ties_go_to_the_lowest_id(function):
    logits = torch.zeros((2, 3000), device=DEVICE)
    logits[0, [2900, 1500, 40]] = 1.0
    tokens = function(logits, torch.zeros(2, device=DEVICE), int64([1, 2]), int64([3, 4]))
    assert tokens.tolist() == [40, 0]


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusual_values_give_ids_in_range(function, temperature):
    inf, nan = float("inf"), float("nan")
    logits = torch.randn((4, 2500), device=DEVICE)
    logits[0] = nan
    logits[1, 7] = nan
    logits[2] = -inf
    logits[3] = -inf
    logits[3, 2345] = 0.5
    tokens = function(logits, torch.full((4,), temperature, device=DEVICE), int64([1, 2, 3, 4]), int64([5, 6, 7, 8]))
    assert ((tokens >= 0) & (tokens < 2500)).all()
    assert tokens[3] == 2345


@BOTH
def test_draw_does_not_depend_on_the_batch(function):
    logits, temperatures, seeds, positions = rows = make_rows(9, 1200)
    together = function(*rows)
    order = torch.randperm(9, device=DEVICE)
    assert torch.equal(function(*(value[order] for value in rows)), together[order])
    alone = function(logits[4:5], temperatures[4:5], seeds[4:5], positions[4:5])
    assert alone.item() == together[4]


@pytest.mark.parametrize("splits", [1, 5, 300])
def test_kernel_result_does_not_depend_on_the_splits(splits):
    rows = make_rows(2, 700)
    assert torch.equal(gumbel_sample(*rows, block=16, target_programs=2 * splits), gumbel_sample(*rows))


@pytest.mark.parametrize("varying", ["position", "seed", "high half of the seed"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_draws_follow_softmax(varying, temperature):
    counter = torch.arange(DRAWS, device=DEVICE)
    fixed = torch.full_like(counter, 1234567)
    seeds = {"position": fixed, "seed": counter, "high half of the seed": counter << 32}[varying]
    positions = counter if varying == "position" else fixed
    logits = torch.tensor([1.5, -1.0, 0.3, 0.0, 2.0, -2.0, 0.7, 1.0, -0.5, 0.1], device=DEVICE)
    temperatures = torch.full((DRAWS,), temperature, device=DEVICE)
    tokens = plain_scores(logits.expand(DRAWS, -1), temperatures, seeds, positions).argmax(1)
    observed = tokens.bincount(minlength=10).double()
    assert abs(chi_square_z(observed, (logits / temperature).softmax(0).double() * DRAWS)) < Z
    few = (logits.expand(FEW, -1), temperatures[:FEW], seeds[:FEW], positions[:FEW])
    for function in (gumbel_sample, reference.gumbel_sample):
        assert (function(*few) == tokens[:FEW]).float().mean() > 0.98


@pytest.mark.parametrize("lag", [1, 2, 16, 256])
@pytest.mark.parametrize("varying", ["position", "seed", "high half of the seed"])
def test_neighbouring_draws_are_independent(varying, lag):
    size = 8
    counter = torch.arange(DRAWS + lag, device=DEVICE)
    fixed = torch.full_like(counter, 42)
    seeds = {"position": fixed, "seed": counter, "high half of the seed": counter << 32}[varying]
    positions = counter if varying == "position" else fixed
    tokens = reference.gumbel_noise(seeds, positions, size).argmax(1)
    pairs = (tokens[lag:] * size + tokens[:-lag]).bincount(minlength=size * size).double()
    assert abs(chi_square_z(pairs, torch.full_like(pairs, DRAWS / size**2))) < Z


def test_noise_is_gumbel_and_uncorrelated_between_ids():
    noise = reference.gumbel_noise(int64([3, 3, 4]), int64([10, 11, 10]), 200_000).double()
    uniform = torch.exp(-torch.exp(-noise))
    for row in uniform:
        observed = torch.histc(row.cpu(), 100, 0, 1)
        assert abs(chi_square_z(observed, torch.full_like(observed, 2000.0))) < Z
        tail = (row > 1 - 1e-3).double().sum().item()  # the large noises, that win
        assert abs(tail - 200) < Z * math.sqrt(200)
    correlation = torch.corrcoef(torch.cat([uniform, uniform.roll(1, 1), uniform.roll(64, 1)]))
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < Z / math.sqrt(200_000)


def test_noise_is_finite_at_the_extremes():
    noise = reference.gumbel_noise(int64([0, -1, 2**63 - 1, -(2**63)]), int64([0, 0, 2**31 - 1, 1]), 300_000)
    assert noise.isfinite().all()
    assert noise.max() - noise.min() < reference.NOISE_SPAN


@pytest.mark.gpu
def test_cuda_graph_replays_follow_their_inputs():
    rows = make_rows(5, 151_936, torch.bfloat16)
    gumbel_sample(*rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = gumbel_sample(*rows)
    for _ in range(3):
        for value, fresh in zip(rows, make_rows(5, 151_936, torch.bfloat16), strict=True):
            value.copy_(fresh)
        graph.replay()
        check(tokens, plain_scores(*rows))


@pytest.mark.parametrize("module", [sampling, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_best_of_the_draws_among_shares_is_the_draw_among_all(module, dtype):
    """With unequal shares, surplus columns, greedy rows and ties between shares."""
    logits, temperatures, seeds, positions = make_rows(24, 999, dtype)
    temperatures[::3] = 0
    logits[0, [5, 400, 998]] = 50.0  # the lowest id wins
    logits[3, [400, 998]] = 50.0
    expected = module.gumbel_sample(logits, temperatures, seeds, positions)
    assert expected[[0, 3]].tolist() == [5, 400]
    draws = []
    for first, end in [(0, 300), (300, 301), (301, 999)]:
        padded = torch.cat([logits[:, first:end], torch.full_like(logits[:, :1], 1e4)], dim=1)
        draws.append(module.gumbel_best(padded, temperatures, seeds, positions, first, end - first))
    winners = torch.stack([scores for scores, _ in draws]).argmax(0, keepdim=True)
    tokens = torch.stack([tokens for _, tokens in draws]).gather(0, winners)[0]
    assert tokens.tolist() == expected.tolist()
    assert len(set(tokens.tolist())) > 10
