"""Filters and penalties against plain float64 references; draws against the filtered distribution."""

import pytest
import torch

from nanovllm.layers import sampler
from nanovllm.layers.ops import torch_ops
from nanovllm.layers.sampler import Filters, apply_filters, top_logprobs


def filters(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return Filters(
        torch.full((n,), float(temperature)),
        torch.full((n,), top_k, dtype=torch.int32),
        torch.full((n,), float(top_p)),
        torch.full((n,), float(min_p)),
    )


def reference_distribution(logits, temperature, top_k, top_p, min_p):
    """Probabilities after the filters, one token after the other in plain Python and float64."""
    probs = (logits.double() / temperature).softmax(0).tolist()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k > 0:
        order = order[:top_k]
    mass, total, kept = sum(probs[i] for i in order), 0.0, []
    for i in order:
        if top_p < 1 and total >= top_p:
            break
        if probs[i] >= min_p * probs[order[0]]:
            kept.append(i)
        total += probs[i] / mass
    norm = sum(probs[i] for i in kept)
    return {i: probs[i] / norm for i in kept}


CASES = [
    (0.3, 0, 0.9, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (1.0, 0, 1e-60, 0.0),  # 0 in float32
    (1.0, 5, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (2.0, 20, 0.7, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.5, 30, 0.95, 0.05),
    (1.0, 10**6, 1.0, 0.0),
    (1.0, -1, 0.999, 1.0),
]


@pytest.mark.parametrize("case", CASES)
def test_filters_keep_what_the_reference_keeps(case):
    logits = torch.randn(8, 97, generator=torch.Generator().manual_seed(0)) * 3
    kept = apply_filters(logits, filters(8, *case))
    for row in range(8):
        expected = list(reference_distribution(logits[row], *case))
        assert sorted(expected) == kept[row].isfinite().nonzero().flatten().tolist()
        assert torch.equal(kept[row, expected], logits[row, expected])


def test_of_equal_logits_the_lower_ids_come_first():
    kept = apply_filters(torch.ones(1, 10), filters(1, top_k=3))
    assert kept[0].isfinite().nonzero().flatten().tolist() == [0, 1, 2]
    kept = apply_filters(torch.ones(1, 10), filters(1, top_p=0.35))
    assert kept[0].isfinite().nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_rows_without_a_filter_and_greedy_rows_stay_as_they_are():
    logits = torch.randn(3, 50)
    mixed = Filters(
        torch.tensor([1.0, 0.0, 1.0]),
        torch.tensor([0, 2, 0], dtype=torch.int32),
        torch.tensor([1.0, 0.2, 0.2]),
        torch.tensor([0.0, 0.9, 0.0]),
    )
    kept = apply_filters(logits, mixed)
    assert torch.equal(kept[:2], logits[:2])
    assert (kept[2] == float("-inf")).any()


def test_rows_are_filtered_alike_in_one_chunk_or_several(monkeypatch):
    logits = torch.randn(7, 50)
    mixed = Filters(torch.rand(7) + 0.1, torch.arange(7, dtype=torch.int32), torch.rand(7), torch.rand(7) * 0.1)
    whole = apply_filters(logits, mixed)
    monkeypatch.setattr(sampler, "CHUNK_ELEMENTS", 100)
    assert torch.equal(apply_filters(logits, mixed), whole)


@pytest.mark.parametrize("case", [(0.8, 0, 1.0, 0.1), (1.1, 6, 0.9, 0.05)])
def test_draws_follow_the_filtered_distribution(case):
    """Chi-square over 20,000 draws of 8 tokens, some of which the filters rule out; more in kernels/test_filters.py."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 3.0, 1.5])
    n = 20_000
    temperature = torch.full((n,), case[0])
    kept = apply_filters(logits.repeat(n, 1), filters(n, *case))
    seeds = torch.full((n,), 1234, dtype=torch.int64)
    counts = torch.bincount(torch_ops().gumbel_sample(kept, temperature, seeds, torch.arange(n)), minlength=8)
    expected = reference_distribution(logits, *case)
    assert 1 < len(expected) < 8
    assert int(counts.sum()) == int(counts[list(expected)].sum()) == n
    chi_square = sum((int(counts[i]) - n * p) ** 2 / (n * p) for i, p in expected.items())
    assert chi_square < 25  # 99.98 % of draws stay below this for 7 degrees of freedom, and there are fewer


def test_logprobs_are_those_of_a_log_softmax_with_the_drawn_token_first():
    logits = torch.randn(4, 40)
    tokens = torch.tensor([3, 39, 0, 7])
    ids, values = top_logprobs(logits, tokens, 5)
    expected = logits.double().log_softmax(-1)
    assert ids.shape == values.shape == (4, 6)
    for row in range(4):
        assert ids[row, 0] == tokens[row]
        assert ids[row, 1:].tolist() == expected[row].argsort(descending=True)[:5].tolist()
        torch.testing.assert_close(values[row].double(), expected[row, ids[row]], rtol=1e-5, atol=1e-5)
