"""The collector is as it was after each context, and what is made inside is still collected."""

import gc
import weakref

import pytest

from nanovllm.utils.collector import collector_frozen, collector_off


class Node:
    """One that can refer to itself."""


def cycle():
    node = Node()
    node.me = node
    return weakref.ref(node)


@pytest.mark.parametrize("enabled", [True, False])
def test_off_and_back_as_it_was(enabled):
    if not enabled:
        gc.disable()
    try:
        with collector_off():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(KeyError), collector_off():
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_frozen_objects_are_left_out_and_new_ones_collected():
    gc.collect()
    before = cycle()
    with collector_frozen():
        assert gc.get_freeze_count() > 0
        inside = cycle()
        gc.collect()
        assert before() is not None
        assert inside() is None
        with collector_frozen():
            pass
        assert gc.get_freeze_count() > 0, "the inner one leaves the outer one's objects alone"
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None
