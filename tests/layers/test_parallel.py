"""What ranks tell each other, and which parts they hold."""

import pytest
import torch

from nanovllm.layers.parallel import Cut, Ranks, Runs
from tests.helpers import in_ranks


def test_shares_of_a_vocabulary_cover_it_and_none_is_empty():
    for size in range(1, 9):
        for vocab in (8, 9, 199, 151936):
            bounds = [Ranks(rank, size).vocab(vocab) for rank in range(size)]
            assert [first for first, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
            assert bounds[-1][1] == vocab
            assert all(0 < end - first <= Ranks(0, size).padded_vocab(vocab) for first, end in bounds)


def test_runs_of_tensors_that_lie_behind_each_other():
    assert Runs.joined([Runs(8, ((2, 4),)), Runs(6, ((3, 6),))]) == Runs(14, ((2, 4), (11, 14)))


def test_cut_of_one_piece_is_a_view():
    tensor = torch.arange(24).view(4, 6)
    part = Cut((4, 6), 1, ((2, 4),)).of(tensor)
    assert part.data_ptr() == tensor[:, 2:].data_ptr()
    assert part.tolist() == [[2, 3], [8, 9], [14, 15], [20, 21]]
    assert Cut((4, 6), 0, ((0, 1), (3, 4))).of(tensor).tolist() == [[0, 1, 2, 3, 4, 5], [18, 19, 20, 21, 22, 23]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size, dtype):
    def run(ranks):
        mine = torch.full((2, 3), ranks.rank + 1, dtype=dtype)
        everyone = ranks.all_gather(mine)
        gathered = ranks.gather(mine.t())  # not contiguous
        told = torch.tensor([7, 8]) if ranks.rank == 0 else torch.zeros(2, dtype=torch.int64)
        ranks.broadcast(told)
        return ranks.all_reduce(mine), everyone, gathered, told.tolist()

    numbers = list(range(1, size + 1))
    for rank, (total, everyone, gathered, told) in enumerate(in_ranks(size, run)):
        assert (total == sum(numbers)).all()
        assert everyone[:, 0, 0].tolist() == numbers
        assert (gathered is None) == (rank > 0)
        assert told == [7, 8]
        if gathered is not None:
            assert [(tuple(x.shape), x[0, 0].item()) for x in gathered] == [((3, 2), n) for n in numbers]


def test_groups_that_have_nothing_to_wait_for():
    """As NCCL's, which puts the work on the current stream."""

    class Group:
        def allreduce(self, tensors, options):
            assert options.asyncOp is False
            tensors[0].mul_(2)

        def _allgather_base(self, out, x, options):
            out.copy_(x.repeat(2))

        def gather(self, outs, inputs, options):
            for out in outs[0]:
                out.copy_(inputs[0])

        def broadcast(self, tensors, options):
            tensors[0].fill_(5)

    ranks, x = Ranks(0, 2, Group()), torch.ones(2, 3)
    ranks.broadcast(x)
    assert ranks.all_reduce(x).tolist() == [[10.0] * 3] * 2
    assert ranks.all_gather(x).shape == (2, 2, 3)
    assert torch.equal(torch.stack(ranks.gather(x)), torch.full((2, 2, 3), 10.0))
