import random

import pytest

from nanovllm.engine.pacing import ROUNDS, Pacer
from tests.engine.simulation import Simulation, expected_completion

GRAPH_TOKENS = 300


def simulation(max_reread=10**9, **options):
    pacer = Pacer(GRAPH_TOKENS, max_reread)
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


def test_a_long_prompt_comes_in_smaller_parts_as_long_as_they_are_few():
    """Read again at most so often: `tokens` of a prompt of `n` read n / 2 keys each, on average."""
    rng = random.Random(0)
    for max_reread, expected in ((400 * 150 // 2, 170), (400 * 100 // 2, 120), (400 * 99 // 2, 420)):
        sim = simulation(max_reread)
        decoding(sim, rng, 20)
        sim.add(prompt(rng, 400), 4)
        assert sim.step().num_tokens == expected


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
