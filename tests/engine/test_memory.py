"""Arithmetic of memory sizing; the measuring itself needs a GPU (test_backends.py)."""

import pytest

from nanovllm.config import Limits
from nanovllm.engine import memory as sizing
from nanovllm.engine.memory import GIB, SLACK, GPUMemory, cpu_pool_blocks, largest_step


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        (Limits(4, 10, 100), [3, 3, 2, 2]),
        (Limits(3, 16384, 100), [100, 100, 100]),  # a sequence is never longer than max_model_len
        (Limits(2, 2, 100), [1, 1]),
    ],
)
def test_largest_step_fills_the_limits(limits, lengths):
    step = largest_step(limits)
    assert step.lengths.tolist() == lengths
    assert len(step.token_ids) == sum(lengths)
    assert step.samples.all()


def memory(**changes):
    fields = {"free_at_start": 10 * GIB, "utilization": 0.5, "fixed": GIB, "activations": GIB, "graphs": GIB}
    return GPUMemory(**{**fields, **changes})


def test_pool_is_what_is_left():
    left = 2 * GIB - SLACK
    assert memory().left_for_kv == left
    assert memory().blocks(GIB // 4, None) == left // (GIB // 4) - 1  # one block is for padding
    assert memory().blocks(GIB // 4, 3) == 3


@pytest.mark.parametrize(("asked", "missing"), [(20, "3.38 GiB"), (8, "0.38 GiB")])
def test_missing_memory_is_named_with_what_helps(asked, missing):
    with pytest.raises(
        ValueError, match=rf"{missing} of GPU memory are missing for a pool of {asked} KV blocks"
    ) as info:
        memory().blocks(GIB // 4, asked)
    assert "gpu_memory_utilization 0.5 allows 5.00" in str(info.value)
    assert "Raise gpu_memory_utilization, lower max_num_batched_tokens" in str(info.value)
    with pytest.raises(ValueError, match="missing for a pool of 1 KV blocks"):
        memory(fixed=5 * GIB).blocks(GIB, None)


def test_cpu_pool_is_bounded_by_need_and_by_memory():
    assert cpu_pool_blocks(1024, 16, max_num_seqs=4, max_model_len=100) == 4 * 7
    assert 1 <= cpu_pool_blocks(GIB // 8, 16, max_num_seqs=4096, max_model_len=100_000) < 4096
    with pytest.raises(ValueError, match=r"a KV block of \d+\.\d+ GiB does not fit"):
        cpu_pool_blocks(2**60, 16, 1, 16)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ([1000, 900, 1000, 870], 100 + 4 * 30),
        ([1000, 900, 1000, 900], 100),
        ([1000, 900, 10**9, 0], 100 + 4 * 64 * 2**20),  # somebody else took all in between
    ],
)
def test_graphs_cost_the_first_one_and_what_each_further_one_adds(free, expected, monkeypatch):
    class Runner:
        device, captured = None, []

        def capture_graphs(self, keys):
            self.captured.append(keys)

        def drop_graphs(self):
            self.captured.append(None)

    readings, runner = iter(free), Runner()
    monkeypatch.setattr(sizing, "free_gpu_bytes", lambda device: next(readings))
    assert sizing._graph_bytes(runner, [1, 2, 3, 4, 5]) == expected
    assert runner.captured[-4:] == [[5], None, [4, 5], None]
