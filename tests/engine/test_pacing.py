import random

import pytest

from nanovllm.engine.pacing import ROUNDS, Pacer
from nanovllm.engine.sequence import Sequence
from tests.engine.simulation import Simulation, expected_completion

GRAPH_TOKENS = 300


def simulation(**options):
    pacer = Pacer(GRAPH_TOKENS)
    return Simulation(4000, 16, 64, 2048, caching=False, pacer=pacer, **options)


def prompt(rng, length):
    return [rng.randrange(50) for _ in range(length)]


def decoding(sim, rng, count, max_tokens=500):
    """Let so many sequences reach their first tokens."""
    for _ in range(count):
        sim.add(prompt(rng, 20), max_tokens)
    sim.step()
    assert sim.step().num_decode_tokens == count


@pytest.mark.parametrize(("extra", "expected"), [(0, GRAPH_TOKENS), (1, 20 + ROUNDS * 280 + 1)])
def test_few_prompt_tokens_beside_decodes_come_in_graphs_and_many_at_once(extra, expected):
    sim, rng = simulation(), random.Random(0)
    decoding(sim, rng, 20)
    sim.add(prompt(rng, ROUNDS * 280 - 100), 4)
    sim.add(prompt(rng, 100 + extra), 4)
    assert sim.step().num_tokens == expected


def test_prompts_with_nothing_beside_them_come_at_once():
    sim, rng = simulation(), random.Random(0)
    sim.add(prompt(rng, 500), 4)
    assert sim.step().num_tokens == 500


def test_prompts_whose_log_probabilities_are_asked_for_come_at_once():
    sim, rng = simulation(), random.Random(0)
    decoding(sim, rng, 20)
    sim.add(prompt(rng, 500), 4).scores_prompt = True
    assert sim.step().num_tokens == 520


def test_no_more_waiting_prompts_are_looked_at_than_it_takes(monkeypatch):
    sim, rng = simulation(), random.Random(0)
    decoding(sim, rng, 20)
    for _ in range(44):
        sim.add(prompt(rng, 400), 4)
    looked_at = []
    monkeypatch.setattr(Sequence, "needs_prompt_scores", property(lambda seq: looked_at.append(seq.seq_id)))
    pacer = sim.scheduler._pacer
    assert pacer.prompt_tokens(20, sim.scheduler.waiting) is None
    assert len(set(looked_at)) <= 3


@pytest.mark.parametrize("delay", [0, 1])
def test_spread_prompts_are_completed_as_they_would_be_at_once(delay):
    sim, rng = simulation(delay=delay), random.Random(1)
    work = [(prompt(rng, rng.randint(1, 400)), rng.randint(1, 60)) for _ in range(100)]  # 64 run at the same time
    for text, max_tokens in work:
        sim.add(text, max_tokens)
    sim.run(1000)
    for seq, (text, max_tokens) in zip(sim.sequences, work, strict=True):
        assert seq.completion_token_ids == expected_completion(text, len(text) + max_tokens, True)
    sizes = [batch.num_tokens for batch in sim.batches if 0 < batch.num_decode_tokens < batch.num_tokens]
    assert sum(size <= GRAPH_TOKENS for size in sizes) >= 10
