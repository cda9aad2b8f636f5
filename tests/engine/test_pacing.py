import random

import pytest

from nanovllm.engine import pacing
from nanovllm.engine.pacing import ROUNDS, TILE, TOKENS_A_STEP, Pacer
from nanovllm.engine.sequence import Sequence
from tests.engine.simulation import Simulation, expected_completion

GRAPH_TOKENS = 300


def simulation(spreads, num_blocks=4000, graph_prompts=64, **options):
    pacer = Pacer(GRAPH_TOKENS, graph_prompts, spreads)
    return Simulation(num_blocks, 16, 64, 2048, caching=False, pacer=pacer, **options)


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
    sim, rng = simulation(False), random.Random(0)
    decoding(sim, rng, 20)
    sim.add(prompt(rng, ROUNDS * 280 - 100), 4)
    sim.add(prompt(rng, 100 + extra), 4)
    assert sim.step().num_tokens == expected


def test_prompts_with_nothing_beside_them_come_at_once():
    sim, rng = simulation(False), random.Random(0)
    sim.add(prompt(rng, 500), 4)
    assert sim.step().num_tokens == 500


def test_prompts_whose_log_probabilities_are_asked_for_come_at_once():
    sim, rng = simulation(False), random.Random(0)
    decoding(sim, rng, 20)
    sim.add(prompt(rng, 500), 4).scores_prompt = True
    assert sim.step().num_tokens == 520


def test_no_more_waiting_prompts_are_looked_at_than_it_takes(monkeypatch):
    sim, rng = simulation(False), random.Random(0)
    decoding(sim, rng, 20)
    for _ in range(44):
        sim.add(prompt(rng, 400), 4)
    looked_at = []
    monkeypatch.setattr(Sequence, "needs_prompt_scores", property(lambda seq: looked_at.append(seq.seq_id)))
    pacer = sim.scheduler._pacer
    assert pacer.prompt_tokens(20, sim.scheduler.waiting) is None
    assert len(set(looked_at)) <= 3


@pytest.mark.parametrize("delay", [0, 1])
def test_sequences_of_a_batch_start_longest_first_and_end_when_the_longest_does(delay):
    sim, rng = simulation(True, delay=delay), random.Random(1)
    work = [(prompt(rng, rng.randint(50, 400)), rng.randint(20, 300)) for _ in range(60)]
    for text, max_tokens in work:
        sim.add(text, max_tokens, batch=1)
    sim.run(1000)
    for seq, (text, max_tokens) in zip(sim.sequences, work, strict=True):
        assert seq.completion_token_ids == expected_completion(text, len(text) + max_tokens, True)
    longest = max(max_tokens for _, max_tokens in work)
    assert len(sim.batches) <= longest + sum(len(text) for text, _ in work) / TOKENS_A_STEP + 2 + 2 * delay
    assert all(batch.num_tokens <= GRAPH_TOKENS for batch in sim.batches)
    with_prompts = [batch for batch in sim.batches if batch.num_tokens > batch.num_decode_tokens]
    # Whole tiles, but where a 1-token rest of a prompt counts as a decode or the prompts end.
    assert sum(batch.num_tokens % TILE == 0 for batch in with_prompts) > 0.9 * len(with_prompts)
    started = [seq.params.max_tokens for batch in sim.batches for seq in batch.admitted]
    assert started == sorted((max_tokens for _, max_tokens in work), reverse=True)
    assert len(with_prompts) > 30


REASONS = ["none", "off", "alone", "two batches", "beside others", "may stop", "scores", "no memory", "equal", "many"]


@pytest.mark.parametrize("reason", REASONS)
def test_sequences_start_at_once_where_waiting_would_cost(reason, monkeypatch):
    """Those whose caller waits for no later one, or that may end early, wait for memory, or end together anyway."""
    sim = simulation(reason != "off", num_blocks=100 if reason == "no memory" else 4000)
    if reason == "many":
        monkeypatch.setattr(pacing, "MAX_SPREAD", 19)
    rng, others = random.Random(2), 0
    if reason == "beside others":
        decoding(sim, rng, 5, max_tokens=1500)
        others = 5
    for i in range(20):
        length = 120 if reason == "equal" else 120 - 5 * i
        batch = None if reason == "alone" else i % 2 if reason == "two batches" else 1
        seq = sim.add(prompt(rng, 100), length, ignore_eos=reason != "may stop", batch=batch)
        seq.scores_prompt = reason == "scores"
    batch = sim.step()
    expected = {"none": GRAPH_TOKENS, "no memory": 100 * len(batch.admitted)}
    assert batch.num_tokens == expected.get(reason, 2000 + others)
    assert [seq.seq_id for seq in batch.admitted] == list(range(others, others + len(batch.admitted)))
    if reason != "scores":  # which the simulation does not answer
        sim.run(2000)
        assert len(sim.finished) == 20 + others


@pytest.mark.parametrize(("num_prompts", "expected"), [(20, [6, 6, 6, 2]), (24, [6, 6, 6, 6]), (25, [25])])
def test_no_more_prompts_come_together_than_a_graph_holds(num_prompts, expected):
    sim, rng = simulation(False, graph_prompts=6), random.Random(0)
    decoding(sim, rng, 20)
    for _ in range(num_prompts):
        sim.add(prompt(rng, 10), 100)
    steps = [sim.step() for _ in expected]
    assert [sum(item.num_tokens > 1 for item in step.items) for step in steps] == expected
