"""What is found to be shared, against a comparison of all pairs; the work list itself is checked in the simulation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.scheduler import Scheduled
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.shared_prefix import SharedPrefixFinder, shared_runs
from tests.engine.simulation import Simulation, expected_completion

TABLES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=300, deadline=None)
@given(TABLES, st.data())
def test_runs_cover_what_each_sequence_shares_with_any_other(tables, data):
    limits = [data.draw(st.integers(0, len(table))) for table in tables]
    runs = shared_runs(tables, limits, 1)
    covered = [0] * len(tables)
    for run in runs:
        assert len({tuple(tables[i][: run.end]) for i in run.members}) == 1
        for i in run.members:
            assert covered[i] == run.begin, "parents come first, and nothing is covered twice"
            covered[i] = run.end
    for i, table in enumerate(tables):
        others = [j for j in range(len(tables)) if j != i]
        expected = max((min(common(table, tables[j]), limits[i], limits[j]) for j in others), default=0)
        assert covered[i] == expected


@settings(max_examples=100, deadline=None)
@given(TABLES, st.integers(1, 12))
def test_a_run_that_saves_too_little_is_left_out_with_what_hangs_on_it(tables, min_saving):
    limits = list(map(len, tables))
    kept = shared_runs(tables, limits, min_saving)
    every = shared_runs(tables, limits, 1)
    cut: list[tuple[int, list[int]]] = []
    expected = []
    for run in every:
        below_a_cut = any(run.begin >= end and set(run.members) <= set(members) for end, members in cut)
        if below_a_cut or (len(run.members) - 1) * (run.end - run.begin) < min_saving:
            cut.append((run.begin, run.members))
        else:
            expected.append(run)
    assert kept == expected


def test_groups_form_and_dissolve_as_sequences_come_and_go():
    sim = Simulation(60, 4, 8, 64, delay=1)
    prefix = [1, 2, 3, 0] * 3
    for i in range(3):
        sim.add([*prefix, i], 6)
    sim.step()  # one computes the prefix for all
    sim.step()
    sim.add([9, 8, 7], 30)
    sim.run(100)
    shared = sim.device.num_shared_steps
    assert 3 <= shared <= 8, "only while at least two of the three decode"
    for seq in sim.sequences:
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        assert seq.completion_token_ids == expected_completion(prompt, seq.max_len, True)
    assert sim.scheduler.block_manager.num_shared_blocks == 0


def test_a_sequence_that_was_preempted_meanwhile_is_another_one():
    """It comes back with other blocks, and no step with shared ones may have been between."""
    finder = SharedPrefixFinder(8, 11, 16, 64, 24 * 2**20, min_run_saving=64)

    def decode(seq_id, block_table, num_preemptions=0):
        seq = Sequence(seq_id, [1] * 257, SamplingParams(), 300, 0)
        seq.row, seq.block_table, seq.num_preemptions = seq_id, block_table, num_preemptions
        return Scheduled(seq, 256, 1, True, num_preemptions)

    first, second = [0, 1, 2, 3, 4], [0, 1, 2, 3, 5]
    third = list(range(10, 15))
    found = finder.find([decode(i, table) for i, table in enumerate((first, second, [*first[:4], 6], first))])
    assert found.hidden[:4].tolist() == [256] * 4
    assert finder.find([decode(i, table) for i, table in enumerate((first, second, first, first))]) is found
    moved = finder.find([decode(i, table, i == 3) for i, table in enumerate((first, second, first, third))])
    assert moved.hidden[:4].tolist() == [256, 256, 256, 0]


def test_too_little_in_bytes_is_read_by_each_sequence_itself():
    """256 tokens of 1 KiB for 5 sequences: 1 MiB is saved, the least that pays is 24 times that."""
    sim = Simulation(60, 64, 8, 1024)
    sim.builder._shared_prefixes = SharedPrefixFinder(8, 11, 16, 64, 1024)
    for i in range(5):
        sim.add([1] * 256 + [i], 4)
    sim.run(50)
    assert sim.device.num_shared_steps == 0
    sim = Simulation(60, 64, 8, 1024)
    sim.builder._shared_prefixes = SharedPrefixFinder(8, 11, 16, 64, 24 * 1024)
    for i in range(5):
        sim.add([1] * 256 + [i], 4)
    sim.run(50)
    assert sim.device.num_shared_steps > 0
