"""top_p against a float64 reference; draws against the filtered distribution."""

import pytest
import torch

from nanovllm.layers import sampler
from nanovllm.layers.ops import torch_ops
from nanovllm.layers.sampler import filter_top_p, sample


def nucleus(logits, temperature, top_p):
    """Ids of the smallest most-probable set whose probability reaches top_p."""
    probs = (logits.double() / temperature).softmax(0)
    kept, total = set(), 0.0
    for i in probs.argsort(descending=True, stable=True).tolist():
        if total >= top_p:
            break
        kept.add(i)
        total += float(probs[i])
    return kept


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_nucleus_with_the_token_that_crosses(temperature, top_p):
    logits = torch.randn(8, 97, generator=torch.Generator().manual_seed(0)) * 3
    kept = filter_top_p(logits, torch.full((8,), temperature), torch.full((8,), top_p))
    for row in range(8):
        expected = nucleus(logits[row], temperature, top_p)
        assert set(kept[row].isfinite().nonzero().flatten().tolist()) == expected
        index = list(expected)
        assert torch.equal(kept[row, index], logits[row, index])


def test_rows_without_a_filter_stay_as_they_are():
    logits = torch.randn(3, 50)
    kept = filter_top_p(logits, torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 0.2, 0.2]))
    assert torch.equal(kept[:2], logits[:2])
    assert (kept[2] == float("-inf")).any()


def test_draws_follow_the_filtered_distribution():
    """Chi-square over 20,000 draws, 8 tokens of which top_p keeps some."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 3.0, 1.5])
    temperature, top_p, n = 0.9, 0.9, 20_000
    tokens = sample(
        torch_ops(),
        logits.repeat(n, 1),
        torch.full((n,), temperature),
        torch.full((n,), top_p),
        torch.full((n,), 1234, dtype=torch.int64),
        torch.arange(n),
    )
    kept = sorted(nucleus(logits, temperature, top_p))
    assert 1 < len(kept) < 8
    probs = (logits[kept].double() / temperature).softmax(0)
    counts = torch.bincount(tokens, minlength=8)
    assert int(counts.sum()) == int(counts[kept].sum())
    chi_square = ((counts[kept] - n * probs) ** 2 / (n * probs)).sum()
    assert chi_square < 25  # 99.98 % of draws stay below this for 7 degrees of freedom, and there are fewer


def test_rows_are_filtered_alike_in_one_chunk_or_several(monkeypatch):
    logits = torch.randn(7, 50)
    temperatures, top_ps = torch.rand(7) + 0.1, torch.rand(7)
    whole = filter_top_p(logits, temperatures, top_ps)
    monkeypatch.setattr(sampler, "CHUNK_ELEMENTS", 100)
    assert torch.equal(filter_top_p(logits, temperatures, top_ps), whole)
