"""Arithmetic of memory sizing; the measuring itself needs a GPU (test_backends.py)."""

import pytest

from nanovllm.config import Limits
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
