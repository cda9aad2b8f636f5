"""Properties of scheduler, block manager and step builder together, on a simulated device (see simulation.py)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.pacing import Pacer
from nanovllm.engine.sequence import Status
from nanovllm.engine.step import RowState
from nanovllm.sampling_params import SamplingParams
from tests.engine.simulation import EOS, Simulation, expected_completion

TOKENS = st.integers(0, 3)  # few values, so that prefixes are shared


@st.composite
def workloads(draw):
    block_size = draw(st.sampled_from([1, 2, 4]))
    num_blocks = draw(st.integers(1, 12))
    max_num_seqs = draw(st.integers(1, 5))
    prefixes = draw(st.lists(st.lists(TOKENS, min_size=0, max_size=12), min_size=1, max_size=3))
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = (draw(st.sampled_from(prefixes)) + draw(st.lists(TOKENS, min_size=1, max_size=6)))[
            : num_blocks * block_size
        ]
        batch = draw(st.sampled_from([None, 1, 1, 2]))
        requests.append((prompt, draw(st.integers(1, 12)), draw(st.booleans()), draw(st.integers(0, 6)), batch))
    pacer = st.builds(Pacer, st.integers(1, 20), st.integers(1, 4), st.booleans())
    return {
        "pool": (num_blocks, block_size, max_num_seqs, draw(st.integers(max_num_seqs, 20))),
        "caching": draw(st.booleans()),
        "delay": draw(st.integers(0, 2)),
        "pacer": draw(st.none() | pacer),
        "requests": requests,
    }


@settings(max_examples=400, deadline=None)
@given(workloads())
def test_every_request_gets_its_own_completion_whatever_the_pressure(work):
    """Random arrivals, shared prefixes, chunks, tiny pools and steps in flight: the text is what it is alone."""
    sim = Simulation(*work["pool"], caching=work["caching"], delay=work["delay"], pacer=work["pacer"])
    arrivals = sorted(work["requests"], key=lambda request: request[3])
    # Every step computes at least one token of the oldest running sequence, which is never preempted, unless it
    # waits for a result in flight. So each sequence in turn needs at most its length in steps, times the delay.
    total = sum(len(prompt) + max_tokens + 2 for prompt, max_tokens, *_ in arrivals)
    max_steps = (total + 8) * (1 + work["delay"]) + 8
    clock = 0
    while arrivals or not sim.scheduler.is_finished():
        while arrivals and arrivals[0][3] <= clock:
            prompt, max_tokens, ignore_eos, _, batch = arrivals.pop(0)
            sim.add(prompt, max_tokens, ignore_eos, batch)
        if not sim.scheduler.is_finished():
            sim.step()
        clock += 1
        assert clock <= max_steps
    sim.run(max_steps)
    assert len(sim.finished) == len(sim.sequences)
    for seq in sim.sequences:
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        assert seq.completion_token_ids == expected_completion(prompt, seq.max_len, seq.params.ignore_eos)
        stopped = seq.token_ids[-1] == EOS and not seq.params.ignore_eos
        assert seq.finish_reason == ("stop" if stopped else "length")
        assert seq.block_table == []
    blocks = sim.scheduler.block_manager
    blocks.check_integrity([])
    assert blocks.num_free_blocks == blocks.num_blocks


@settings(max_examples=100, deadline=None)
@given(workloads(), st.data())
def test_abort_at_any_time_leaves_the_others_alone(work, data):
    sim = Simulation(*work["pool"], caching=work["caching"], delay=work["delay"], pacer=work["pacer"])
    for prompt, max_tokens, ignore_eos, _, batch in work["requests"]:
        sim.add(prompt, max_tokens, ignore_eos, batch)
    aborted = set()

    def maybe_abort():
        alive = [seq for seq in sim.sequences if seq.status is not Status.FINISHED]
        if alive and data.draw(st.integers(0, 3)) == 0:
            victim = data.draw(st.sampled_from(alive))
            sim.scheduler.finish(victim, "abort")
            aborted.add(victim.seq_id)

    sim.run(10_000, maybe_abort)
    for seq in sim.sequences:
        if seq.seq_id not in aborted:
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            assert seq.completion_token_ids == expected_completion(prompt, seq.max_len, seq.params.ignore_eos)
    sim.scheduler.block_manager.check_integrity([])


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_long_prompt_does_not_hold_up_who_is_generating(delay):
    """A 20,000-token prompt at a budget of 512: each running sequence gets a token every step."""
    sim = Simulation(num_blocks=2000, block_size=16, max_num_seqs=8, max_tokens=512, delay=delay)
    running = [sim.add([i], 60) for i in range(4)]
    sim.step()
    long = sim.add([1] * 20_000, 3)
    for _ in range(40):
        batch = sim.step()
        scheduled = [item.seq for item in batch.items]
        assert all(seq in scheduled for seq in running)
        assert batch.num_tokens == 512 or long.num_computed_tokens >= 20_000
    assert long.num_computed_tokens >= 20_000
    sim.run(200)


def test_a_running_prompt_older_than_the_decodes_does_not_hold_them_up():
    sim = Simulation(num_blocks=200, block_size=16, max_num_seqs=8, max_tokens=16)
    sim.add([1] * 1000, 3)
    sim.step()
    young = [sim.add([2, i], 5) for i in range(3)]
    while not all(seq.num_computed_tokens for seq in young):
        sim.step()
    for _ in range(3):
        scheduled = [item.seq for item in sim.step().items]
        assert all(seq in scheduled for seq in young)


@pytest.mark.parametrize("delay", [0, 1])
def test_who_waits_for_room_is_not_overtaken_for_ever(delay):
    """It needs the whole pool, and a small request comes in every step."""
    sim = Simulation(num_blocks=10, block_size=2, max_num_seqs=4, max_tokens=64, delay=delay)
    for i in range(4):
        sim.add([i], 6)
    sim.step()
    big = sim.add([7] * 19, 2)
    for i in range(60):
        sim.add([i % 5, 3], 4)
        sim.step()
        if big.status is Status.FINISHED:
            break
    assert i < 14  # four that run need at most six steps, and it needs two of its own
    assert big.completion_token_ids == expected_completion([7] * 19, 21, True)
    sim.run(1000)
    first_steps = {}
    for number, batch in enumerate(sim.batches):
        for item in batch.items:
            first_steps.setdefault(item.seq.seq_id, number)
    order = [first_steps[seq.seq_id] for seq in sim.sequences]
    assert order == sorted(order)  # in order of arrival, all of them


def test_preempted_sequence_finds_its_own_blocks_again():
    sim = Simulation(num_blocks=8, block_size=2, max_num_seqs=2, max_tokens=64)
    first, second = sim.add([1, 2, 3], 9), sim.add([4, 5, 6, 7, 8], 7)
    sim.run(100)
    assert second.num_preemptions == 1
    admissions = [item for batch in sim.batches for item in batch.items if item.seq is second and item.epoch == 1]
    assert admissions[0].start >= 4  # published before it was preempted, and not taken by the first one
    assert second.completion_token_ids == expected_completion([4, 5, 6, 7, 8], 12, True)
    assert first.completion_token_ids == expected_completion([1, 2, 3], 12, True)


def test_preempted_sequences_keep_their_tokens_and_hit_their_own_cached_blocks():
    sim = Simulation(num_blocks=6, block_size=2, max_num_seqs=2, max_tokens=64)
    first, second = sim.add([1, 2, 3], 9), sim.add([4, 5, 6], 9)
    sim.run(100)
    assert second.num_preemptions > 0
    assert first.num_preemptions == 0
    for seq, prompt in ((first, [1, 2, 3]), (second, [4, 5, 6])):
        assert seq.completion_token_ids == expected_completion(prompt, 12, True)
    recomputed = [item for batch in sim.batches for item in batch.items if item.seq is second and item.num_tokens > 1]
    assert recomputed[-1].end > 3  # generated tokens were computed again, in one go


def test_sequence_that_outgrows_the_pool_ends_at_the_exact_token():
    """A pool of 12 slots holds the KV of 12 tokens; the 13th is drawn from them and needs none."""
    for others in (0, 3):
        sim = Simulation(num_blocks=6, block_size=2, max_num_seqs=4, max_tokens=64)
        big = sim.add([1, 2, 3], 1000)
        for i in range(others):
            sim.add([9, i], 4)
        sim.run(1000)
        assert big.finish_reason == "length"
        assert len(big.token_ids) == 13


def test_equal_prompts_arriving_together_are_computed_once():
    prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    sim = Simulation(num_blocks=100, block_size=2, max_num_seqs=8, max_tokens=64)
    seqs = [sim.add(prompt, 4) for _ in range(5)]
    sim.run(100)
    assert [seq.num_cached_tokens for seq in seqs] == [0, 8, 8, 8, 8]
    assert sim.device.num_tokens_run == len(prompt) + 4 * 1 + 5 * 3  # once, four last tokens, three decodes each


def test_fully_cached_prompt_computes_its_last_block_only():
    sim = Simulation(num_blocks=100, block_size=4, max_num_seqs=2, max_tokens=64)
    sim.add([1, 2, 3, 4, 5, 6, 7, 8], 2)
    sim.run(100)
    again = sim.add([1, 2, 3, 4, 5, 6, 7, 8], 2)
    sim.run(100)
    assert again.num_cached_tokens == 4
    assert again.completion_token_ids == expected_completion([1, 2, 3, 4, 5, 6, 7, 8], 10, True)


def test_rows_and_running_set_respect_max_num_seqs():
    sim = Simulation(num_blocks=100, block_size=4, max_num_seqs=3, max_tokens=64)
    for i in range(10):
        sim.add([i], 5)
    most = 0
    while not sim.scheduler.is_finished():
        most = max(most, len(sim.step().items))
    assert most == 3


def test_prompt_that_fills_a_large_pool_runs():
    """The reserve against thrashing must not apply when nothing runs."""
    sim = Simulation(num_blocks=200, block_size=1, max_num_seqs=2, max_tokens=256)
    seq = sim.add([1] * 200, 5)
    sim.run(10)
    assert len(seq.token_ids) == 201


def test_preempted_sequences_wait_in_front_and_keep_their_first_cache_figures():
    sim = Simulation(num_blocks=8, block_size=2, max_num_seqs=3, max_tokens=64)
    seqs = [sim.add([i, i + 1, i + 2], 12) for i in (1, 10, 20, 30)]
    while not any(seq.num_preemptions for seq in seqs):
        sim.step()
    waiting = [seq.seq_id for seq in sim.scheduler.waiting]
    assert waiting == sorted(waiting)
    assert len(waiting) > 1
    sim.run(200)
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 0, 0]


def test_sequences_put_off_for_a_shared_prefix_keep_their_order_and_find_it():
    """They arrive while the first is in the middle of a chunked prompt."""
    prompt = list(range(3, 23))
    sim = Simulation(num_blocks=100, block_size=2, max_num_seqs=8, max_tokens=8)
    first = sim.add(prompt, 4)
    sim.step()
    others = [sim.add(prompt, 4) for _ in range(3)]
    sim.step()
    assert [seq.seq_id for seq in sim.scheduler.waiting] == [1, 2, 3]
    assert first.num_computed_tokens == 16
    sim.step()  # the last chunk leaves budget over, so all three are looked at and put off
    assert first.num_computed_tokens == 20
    assert [seq.seq_id for seq in sim.scheduler.waiting] == [1, 2, 3]
    sim.run(100)
    assert [seq.num_cached_tokens for seq in others] == [18, 18, 18]


def test_row_state_takes_in_what_the_builder_sends():
    sim = Simulation(num_blocks=10, block_size=4, max_num_seqs=4, max_tokens=64)
    seeds = [2**40 + 5, -(2**40) - 3, -1, 0]
    for i, seed in enumerate(seeds):
        seq = sim.add([i, 1, 2, 3, 4], 5)
        seq.seed = seed
        seq.rotary_offset = 70_000 * i
        seq.params = SamplingParams(temperature=0.5 + i, top_p=0.9, top_k=i, min_p=0.25, repetition_penalty=1 + i)
    batch = sim.scheduler.schedule()
    inputs = sim.builder.build(batch)
    state = RowState.allocate(4, 10, 9, torch.device("cpu"), long_rope=True)
    state.apply(torch.from_numpy(inputs.table_changes), torch.from_numpy(inputs.row_params))
    for i, item in enumerate(batch.items):
        row = item.seq.row
        assert int(state.seeds[row]) == seeds[i]
        assert float(state.temperatures[row]) == 0.5 + i
        assert int(state.top_ks[row]) == i
        assert int(state.rotary(torch.tensor([7]), torch.tensor([row]))) == 7 + 70_000 * i
        assert float(state.min_ps[row]) == 0.25
        assert state.penalties[:, row].tolist() == [1 + i, 0, 0]
        assert float(state.top_ps[row]) == pytest.approx(0.9)
        assert state.block_tables[row, :2].tolist() == item.seq.block_table
    assert (state.block_tables[4] == 9).all()
    assert state.penalties[:, 4].tolist() == [1, 0, 0]
