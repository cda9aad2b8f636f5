"""Block manager alone: eviction order, sharing, publication, collisions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine import block_manager as module
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def sequence(tokens, seq_id=0):
    return Sequence(seq_id, tokens, SamplingParams(), 1000, 0)


def compute(blocks, tokens):
    """A sequence whose tokens are all computed and published."""
    seq = sequence(tokens)
    blocks.allocate(seq, blocks.find_prefix(seq))
    blocks.publish(seq, len(tokens))
    return seq


def test_prefix_is_found_only_after_publication_and_never_covers_the_last_token():
    blocks = BlockManager(8, 2)
    seq = sequence([1, 2, 3, 4])
    blocks.allocate(seq, [])
    assert blocks.find_prefix(sequence([1, 2, 3, 4])) == []
    blocks.publish(seq, 3)
    assert blocks.find_prefix(sequence([1, 2, 3, 4])) == seq.block_table[:1]
    blocks.publish(seq, 4)
    assert blocks.find_prefix(sequence([1, 2, 3, 4])) == seq.block_table[:1]
    assert blocks.find_prefix(sequence([1, 2, 3, 4, 5])) == seq.block_table
    assert blocks.find_prefix(sequence([1, 2, 9, 4, 5])) == seq.block_table[:1]
    assert blocks.find_prefix(sequence([9, 2, 3, 4, 5])) == []


def test_what_is_rotated_differently_shares_no_prefix():
    blocks = BlockManager(8, 2)
    tokens = [1, 2, 3, 4, 5]
    first = compute(blocks, tokens)
    other = Sequence(1, tokens, SamplingParams(), 1000, 0, rotary_offset=64)
    assert blocks.find_prefix(other) == []
    blocks.allocate(other, [])
    blocks.publish(other, 5)
    for seq in (first, other):
        again = Sequence(2, tokens, SamplingParams(), 1000, 0, rotary_offset=seq.rotary_offset)
        assert blocks.find_prefix(again) == seq.block_table[:2]
    blocks.free(other)
    blocks.allocate(other, blocks.find_prefix(other))
    other.token_ids.append(6)
    blocks.publish(other, 6)
    assert blocks.find_prefix(Sequence(3, [*tokens, 6, 7], SamplingParams(), 1000, 0)) == first.block_table[:2]


def test_an_equal_key_under_another_root_is_no_hit(monkeypatch):
    monkeypatch.setattr(module, "chain_key", lambda parent, tokens: b"key")
    blocks = BlockManager(8, 2)
    compute(blocks, [1, 2, 3])
    assert blocks.find_prefix(sequence([1, 2, 3])) != []
    assert blocks.find_prefix(Sequence(1, [1, 2, 3], SamplingParams(), 1000, 0, rotary_offset=64)) == []


def test_shared_blocks_are_counted_and_survive_one_owner():
    blocks = BlockManager(8, 2)
    first = compute(blocks, [1, 2, 3, 4, 5])
    second = compute(blocks, [1, 2, 3, 4, 6])
    assert second.block_table[:2] == first.block_table[:2]
    assert [blocks.ref_counts[b] for b in first.block_table] == [2, 2, 1]
    blocks.free(first)
    assert [blocks.ref_counts[b] for b in second.block_table] == [1, 1, 1]
    blocks.check_integrity([second])


def test_eviction_takes_free_blocks_first_then_the_least_recently_used_tail_first():
    blocks = BlockManager(6, 2)
    old = compute(blocks, [1, 1, 2, 2])
    new = compute(blocks, [3, 3, 4, 4])
    old_table, new_table = list(old.block_table), list(new.block_table)
    blocks.free(old)
    blocks.free(new)
    taker = sequence([0] * 12)
    blocks.allocate(taker, [])
    untouched = {4, 5}
    assert set(taker.block_table[:2]) == untouched
    assert taker.block_table[2:] == [old_table[1], old_table[0], new_table[1], new_table[0]]


def test_a_hit_makes_a_block_recently_used():
    blocks = BlockManager(4, 2)
    old, new = compute(blocks, [1, 1]), compute(blocks, [2, 2])
    table = list(old.block_table)
    blocks.free(old)
    blocks.free(new)
    again = sequence([1, 1, 5])
    blocks.allocate(again, blocks.find_prefix(again))
    assert again.block_table[:1] == table
    blocks.free(again)
    taker = sequence([0] * 6)
    blocks.allocate(taker, [])
    assert table[0] not in taker.block_table
    assert blocks.find_prefix(sequence([1, 1, 5])) == table


def test_second_copy_of_a_text_stays_private_but_what_follows_it_can_be_found():
    blocks = BlockManager(8, 2)
    first, second = sequence([1, 2, 3, 4]), sequence([1, 2, 5, 6])
    blocks.allocate(first, [])
    blocks.allocate(second, [])
    blocks.publish(first, 4)
    blocks.publish(second, 4)
    found = blocks.find_prefix(sequence([1, 2, 5, 6, 7]))
    assert found == [first.block_table[0], second.block_table[1]]


def test_hash_collisions_never_mix_texts(monkeypatch):
    monkeypatch.setattr(module, "chain_key", lambda parent, tokens: b"same")
    blocks = BlockManager(8, 2)
    compute(blocks, [1, 2])
    assert blocks.find_prefix(sequence([3, 4, 5])) == []
    other = compute(blocks, [3, 4])
    assert blocks.find_prefix(sequence([3, 4, 5])) == other.block_table
    assert blocks.find_prefix(sequence([1, 2, 5])) == []


def test_collision_in_the_parent_never_mixes_texts(monkeypatch):
    """Two texts with equal last blocks whose first blocks collide: the last block belongs to one of them only."""
    real = module.chain_key
    monkeypatch.setattr(module, "chain_key", lambda parent, tokens: b"root" if not parent else real(parent, tokens))
    blocks = BlockManager(8, 2)
    compute(blocks, [1, 2, 7, 7])
    compute(blocks, [3, 4])  # takes the colliding key over
    assert len(blocks.find_prefix(sequence([3, 4, 7, 7, 0]))) == 1


def test_caching_switched_off_finds_nothing():
    blocks = BlockManager(8, 2, enable_prefix_caching=False)
    compute(blocks, [1, 2, 3])
    assert blocks.find_prefix(sequence([1, 2, 3])) == []


def test_integrity_check_notices_a_lost_block():
    blocks = BlockManager(4, 2)
    compute(blocks, [1, 2, 3])
    with pytest.raises(RuntimeError, match="reference counts"):
        blocks.check_integrity([])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_life_of_a_pool(data):
    """Whatever is allocated, extended, published and freed: accounting holds, and hits hold the right text."""
    blocks = BlockManager(data.draw(st.integers(1, 10)), data.draw(st.integers(1, 3)))
    content: dict[int, tuple] = {}  # block -> the text up to and including it, as last written
    alive: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if alive and data.draw(st.booleans()):
            blocks.free(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        else:
            seq = sequence(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12)))
            prefix = blocks.find_prefix(seq)
            for i, block in enumerate(prefix):
                assert content[block] == tuple(seq.token_ids[: (i + 1) * blocks.block_size])
            if blocks.num_blocks_needed(seq, prefix) > blocks.num_free_blocks:
                continue
            blocks.allocate(seq, prefix)
            alive.append(seq)
            computed = data.draw(st.integers(seq.num_computed_tokens, len(seq.token_ids)))
            for i in range(len(prefix), len(seq.block_table)):
                content[seq.block_table[i]] = tuple(seq.token_ids[: (i + 1) * blocks.block_size])
            blocks.publish(seq, computed)
        blocks.check_integrity(alive)


def test_publishing_under_a_colliding_key_takes_the_key_over(monkeypatch):
    """Equal tokens after colliding parents: the second text's block must not pass for the first's."""
    real = module.chain_key
    monkeypatch.setattr(module, "chain_key", lambda parent, tokens: b"root" if not parent else real(parent, tokens))
    blocks = BlockManager(8, 2)
    compute(blocks, [1, 2, 7, 7])
    other = compute(blocks, [3, 4, 7, 7])
    assert blocks.find_prefix(sequence([3, 4, 7, 7, 0])) == other.block_table
    assert blocks.find_prefix(sequence([1, 2, 7, 7, 0])) == []
