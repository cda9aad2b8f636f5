"""The filters' bounds against the sorting reference and float64; draws within them against the exact distribution."""

import pytest
import torch

from nanovllm.kernels.filters import filter_bounds
from nanovllm.kernels.sampling import filtered_sample
from nanovllm.layers import sampler
from nanovllm.layers.sampler import Filters, apply_filters
from tests.cases import in_pairs
from tests.kernels.test_sampling import DEVICE, DRAWS, FEW, Z, chi_square_z, int64
from tests.layers.test_sampler import reference_distribution

DTYPES = [torch.float32, torch.bfloat16]
OPTIONS = [{}, {"tile": 64, "depth": 3, "num_warps": 4}]
TILES = pytest.mark.parametrize("options", OPTIONS, ids=["whole", "tiles"])
WIDE = [pytest.param(columns, marks=pytest.mark.gpu) for columns in (1000, 2048)]


def make_filters(*rows):
    """Rows of (temperature, top_k, top_p, min_p)."""
    temperatures, top_ks, top_ps, min_ps = zip(*rows, strict=True)
    real = [torch.tensor(values, dtype=torch.float32, device=DEVICE) for values in (temperatures, top_ps, min_ps)]
    return Filters(real[0], torch.tensor(top_ks, dtype=torch.int32, device=DEVICE), *real[1:])


def kept_by_kernel(logits, filters, **options):
    floors, last_ids = filter_bounds(
        logits, filters.temperatures, filters.top_ks, filters.top_ps, filters.min_ps, **options
    )
    x, ids = logits.float(), torch.arange(logits.shape[1], device=DEVICE)
    stays = (x > floors[:, None]) | ((x == floors[:, None]) & (ids <= last_ids[:, None]))
    return stays & (x > float("-inf"))


def kept_by_reference(logits, filters):
    return apply_filters(logits, filters) > float("-inf")


def kept_in_float64(logits, filters):
    """For vocabularies where the reference's sums in float32 are a token or two off."""
    scaled = logits.double() / filters.temperatures.clamp(min=1e-5)[:, None]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    limits = torch.where(filters.top_ks > 0, filters.top_ks, logits.shape[1])
    inside = torch.arange(logits.shape[1], device=DEVICE) < limits[:, None]
    probs = ordered.where(inside, float("-inf")).softmax(-1)
    inside &= (probs.cumsum(-1) - probs < filters.top_ps[:, None]) | (filters.top_ps == 1)[:, None]
    inside &= probs >= filters.min_ps[:, None] * probs[:, :1]
    inside |= (filters.temperatures < 1e-5)[:, None]
    return torch.zeros_like(inside).scatter_(1, order, inside)


@pytest.mark.parametrize(("dtype", "columns", "spread"), in_pairs(DTYPES, [151_936, 151_669], [0.3, 2.0]))
def test_whole_vocabularies_are_right_to_the_token(dtype, columns, spread):
    logits = (torch.randn(4, columns, generator=torch.Generator().manual_seed(0)) * spread).to(DEVICE, dtype)
    filters = make_filters((0.6, 50, 0.95, 0.0), (0.6, 0, 0.95, 0.0), (0.6, 20_000, 1.0, 0.0), (0.6, 0, 0.9, 0.01))
    wrong = (kept_by_kernel(logits, filters) != kept_in_float64(logits, filters)).sum(1)
    assert wrong.max() <= 1  # where a sum of thousands of probabilities comes within its rounding of top_p


@pytest.mark.parametrize(("dtype", "options", "columns"), in_pairs(DTYPES, OPTIONS, [5, 97, 520, *WIDE]))
def test_rows_with_filters_of_their_own_keep_what_the_reference_keeps(dtype, options, columns):
    generator = torch.Generator().manual_seed(columns)
    logits = (torch.randn(15, columns, generator=generator) * 3).to(DEVICE, dtype)
    filters = make_filters(
        (1.0, 0, 1.0, 0.0),
        (0.0, 3, 0.5, 0.5),
        (1.0, 1, 1.0, 0.0),
        (0.7, 50, 1.0, 0.0),
        (0.7, 50, 0.95, 0.0),
        (1.0, 10**6, 1.0, 0.0),
        (1.0, columns, 0.9, 0.0),
        (1.0, 0, 0.9, 0.0),
        (2.0, -1, 0.999, 0.0),
        (1.0, 0, 1e-9, 0.0),
        (1.0, 0, 1e-60, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.0, 0, 1.0, 1.0),
        (1.5, 900, 0.7, 0.001),
        (0.3, 20, 0.9, 0.05),
    )
    assert torch.equal(kept_by_kernel(logits, filters, **options), kept_by_reference(logits, filters))


@TILES
@pytest.mark.parametrize("levels", [1, 2, 7])
def test_ties_are_kept_from_the_lowest_id_on(options, levels):
    """Of few distinct values; with one level every probability is 1 / 256, and the bounds are exact."""
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(0, levels, (5, 256), generator=generator).float().to(DEVICE)
    filters = make_filters(
        (1.0, 3, 1.0, 0.0), (1.0, 100, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 200, 0.26, 0.0), (1.0, 0, 1.0, 1.0)
    )
    kept = kept_by_kernel(logits, filters, **options)
    assert torch.equal(kept, kept_by_reference(logits, filters))
    if levels == 1:
        assert kept.sum(1).tolist() == [3, 100, 128, 52, 256]
        assert kept[0].nonzero().flatten().tolist() == [0, 1, 2]


@TILES
def test_masked_logits_stay_masked(options):
    inf = float("inf")
    logits = torch.full((5, 300), -inf, device=DEVICE)
    logits[:4, [7, 150, 290]] = torch.tensor([1.0, 3.0, 2.0], device=DEVICE)
    filters = make_filters(
        (1.0, 2, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 0, 0.9999, 0.0), (1.0, 4, 0.5, 0.0), (1.0, 4, 0.5, 0.1)
    )
    kept = [row.nonzero().flatten().tolist() for row in kept_by_kernel(logits, filters, **options)]
    assert kept == [[150, 290], [7, 150, 290], [7, 150, 290], [150], []]


def test_values_far_apart_and_close_together():
    """The search splits ranges of values: clusters, powers of ten and neighbours in float32 all have to end."""
    step = torch.arange(128, dtype=torch.float32)
    clusters = torch.cat([step * 1e-6, 50 + step * 1e-5])
    powers = torch.cat([-(10.0 ** (step / 4 - 10)), 10.0 ** (step / 32 - 3)])
    neighbours = torch.cat([(1 + step * 2**-23), -(1 + step * 2**-23)])
    logits = torch.stack([clusters, powers, neighbours])[:, torch.randperm(256)].to(DEVICE)
    for case in ((1.0, 40, 1.0, 0.0), (1.0, 130, 1.0, 0.0), (1.0, 255, 1.0, 0.0)):
        filters = make_filters(*[case] * 3)
        assert torch.equal(kept_by_kernel(logits, filters), kept_by_reference(logits, filters))


def test_unusual_values_end_and_give_ids_in_range():
    nan, inf = float("nan"), float("inf")
    logits = torch.randn((5, 500), device=DEVICE)
    logits[0] = nan
    logits[1, 7] = nan
    logits[2, 9] = inf
    logits[3] = -inf
    logits[4] = 3e38
    filters = make_filters(*[(0.8, 20, 0.9, 0.01)] * 5)
    tokens = filtered_sample(logits, filters, int64([1, 2, 3, 4, 5]), int64([5, 6, 7, 8, 9]))
    assert ((tokens >= 0) & (tokens < 500)).all()


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, 1500, generator=generator) * 3).to(DEVICE)
    cases = [(1.0, 0, 0.9, 0.0), (0.5, 7, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.5, 90, 0.6, 0.0), (1.0, 0, 0.3, 0.01)]
    filters = make_filters(*cases, (0.0, 0, 1.0, 0.0))
    seeds, positions = int64(range(6)), int64(range(10, 16))
    tokens = filtered_sample(logits, filters, seeds, positions)
    for row, part in enumerate(filters.split(1)):
        alone = slice(row, row + 1)
        assert filtered_sample(logits[alone], part, seeds[alone], positions[alone]).item() == tokens[row]
    assert torch.equal(tokens, sampler.filtered_sample(logits, filters, seeds, positions))


def test_rows_of_a_wider_buffer():
    logits = torch.randn(3, 1024, device=DEVICE)[:, :1000]
    filters = make_filters((1.0, 9, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 40, 0.8, 0.0))
    assert torch.equal(kept_by_kernel(logits, filters), kept_by_reference(logits, filters))


CASES = [(0.9, 0, 0.9, 0.0), (1.2, 5, 1.0, 0.0), (0.8, 0, 1.0, 0.1), (1.1, 6, 0.9, 0.05), (1.0, 0, 1.0, 0.0)]


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_filtered_distribution(case):
    """Chi-square over 20,000 draws; the bounds come from the kernel, the noise from the reference."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 3.0, 1.5], device=DEVICE)
    kept = kept_by_kernel(logits[None], make_filters(case))[0]
    masked = torch.where(kept, logits, float("-inf")).expand(DRAWS, -1)
    temperatures = torch.full((DRAWS,), case[0], device=DEVICE)
    seeds, positions = int64([99] * DRAWS), torch.arange(DRAWS, device=DEVICE)
    tokens = sampler.reference.gumbel_sample(masked, temperatures, seeds, positions)
    expected = reference_distribution(logits, *case)
    ids = sorted(expected)
    observed = tokens.bincount(minlength=8).double().cpu()
    assert int(observed[ids].sum()) == DRAWS
    probabilities = torch.tensor([expected[i] for i in ids], dtype=torch.float64)
    assert abs(chi_square_z(observed[ids], probabilities * DRAWS)) < Z
    few = make_filters(*[case] * FEW)
    drawn = filtered_sample(logits.repeat(FEW, 1), few, seeds[:FEW], positions[:FEW])
    assert (drawn == tokens[:FEW]).float().mean() > 0.98


@pytest.mark.gpu
def test_cuda_graph_replays_follow_their_inputs():
    """The vocabulary and rows of an engine: rows with filters, without, and greedy, in bfloat16."""
    cases = [(0.6, 50, 0.95, 0.0), (0.6, 0, 0.95, 0.0), (1.0, 0, 1.0, 0.02), (0.6, 0, 1.0, 0.0), (0.0, 5, 1.0, 0.0)]
    logits = torch.empty(40, 151_936, dtype=torch.bfloat16, device=DEVICE)
    filters = make_filters(*cases * 8)
    arguments = (logits, filters.temperatures, filters.top_ks, filters.top_ps, filters.min_ps)
    filter_bounds(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        floors, last_ids = filter_bounds(*arguments)
    for spread in (0.3, 1.0, 5.0):
        logits.normal_(0, spread)
        graph.replay()
        x, ids = logits.float(), torch.arange(logits.shape[1], device=DEVICE)
        kept = (x > floors[:, None]) | ((x == floors[:, None]) & (ids <= last_ids[:, None]))
        assert (kept != kept_in_float64(logits, filters)).sum(1).max() <= 1
