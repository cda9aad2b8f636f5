"""The ring in shared memory: every message comes out as it went in, on every reader, whatever the sizes."""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.channel import HEADER, NUM_SLOTS, SLOT_BYTES, ChannelBroken, ChannelClosed, Receiver, Sender
from nanovllm.engine.prompt_scores import PromptScores
from nanovllm.engine.step import ON_DEVICE, ROW_PARAMS, StepInput
from nanovllm.engine.step_message import StepDecoder, StepEncoder
from nanovllm.kernels.shared_prefixes import SharedPrefixes


@contextmanager
def ring(readers=1, num_slots=3, slot_bytes=HEADER.size + 10):
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(readers)]
    sender = Sender([write for _, write in pipes], num_slots, slot_bytes)
    receivers = [Receiver(sender.name, i, read, readers, num_slots, slot_bytes) for i, (read, _) in enumerate(pipes)]
    try:
        yield sender, receivers
    finally:
        sender.close()
        for receiver in receivers:
            receiver.close()


def never():
    raise TimeoutError("there should be room")


MESSAGES = st.lists(st.tuples(st.integers(0, 2**16 - 1), st.lists(st.binary(max_size=40), max_size=3)), max_size=12)


@settings(deadline=None, max_examples=50)
@given(MESSAGES, st.integers(1, 3), st.integers(1, 4), st.integers(1, 30))
def test_messages_of_any_size_come_out_in_order(messages, readers, num_slots, room):
    """Also where one is larger than the whole ring: it goes through as readers make room."""
    with ring(readers, num_slots, HEADER.size + room) as (sender, receivers), ThreadPoolExecutor(readers + 1) as pool:
        taken = [pool.submit(lambda r: [r.receive() for _ in messages], receiver) for receiver in receivers]
        for kind, parts in messages:
            sender.send(kind, parts, lambda: None)
        for future in taken:
            assert future.result(timeout=30) == [(kind, b"".join(parts)) for kind, parts in messages]


def test_sender_waits_for_the_slowest_reader_only_when_the_ring_is_full():
    with ring(2) as (sender, (fast, slow)):
        for i in range(3):
            sender.send(i, [b"x"], never)
            assert fast.receive() == (i, b"x")
        with pytest.raises(TimeoutError):
            sender.send(3, [b"y"], never)
        assert slow.receive() == (0, b"x")
        sender.send(3, [b"y"], never)
        assert [slow.receive()[0] for _ in range(3)] == [1, 2, 3]


def test_fragments_are_checked():
    with ring(num_slots=1) as (sender, (receiver,)):
        memory = SharedMemory(sender.name)
        sender.send(1, [b"abc"], never)
        HEADER.pack_into(memory.buf, 64, 0, 11, 1, 0)  # longer than a slot
        with pytest.raises(ChannelBroken, match="fragment 0 was expected, number 0 of 11 bytes is there"):
            receiver.receive()
        memory.close()
    with ring(num_slots=1) as (sender, (receiver,)):
        memory = SharedMemory(sender.name)
        sender.send(1, [b"abc"], never)
        HEADER.pack_into(memory.buf, 64, 5, 3, 1, 0)
        with pytest.raises(ChannelBroken, match="fragment 0 was expected, number 5 of 3 bytes"):
            receiver.receive()
        memory.close()


def test_reader_notices_that_the_sender_is_gone():
    with ring() as (sender, (receiver,)):
        sender.send(1, [b"last"], never)
        sender.close()
        assert receiver.receive() == (1, b"last")
        with pytest.raises(ChannelClosed):
            receiver.receive()
        sender.close = lambda: None


def test_reader_that_waits_is_woken():
    with ring() as (sender, (receiver,)), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.receive)
        threading.Event().wait(0.05)
        assert not waiting.done()
        sender.send(9, [b"now"], never)
        assert waiting.result(timeout=10) == (9, b"now")


def test_names_are_unique_and_gone_once_unlinked():
    with ring() as (one, (receiver,)), ring() as (other, _):
        assert one.name != other.name
        one.unlink()
        with pytest.raises(FileNotFoundError):
            SharedMemory(one.name)
        one.send(1, [b"still there"], never)
        assert receiver.receive() == (1, b"still there")


# ---- steps -------------------------------------------------------------------------------------------------


def step(lengths, decode=False, samples=None, **changes):
    n, rng = len(lengths), np.random.default_rng(len(lengths))
    lengths = np.array(lengths, np.int32)
    token_ids = np.full(n, ON_DEVICE, np.int32) if decode else rng.integers(0, 99, lengths.sum(), np.int32)
    return StepInput(
        rows=rng.permutation(n).astype(np.int32),
        starts=rng.integers(0, 1000, n, np.int32),
        lengths=lengths,
        token_ids=token_ids,
        samples=np.ones(n, np.int32) if samples is None else np.array(samples, np.int32),
        **{"table_changes": np.zeros((3, 0), np.int32), "row_params": np.zeros((ROW_PARAMS, 0), np.int32), **changes},
    )


def assert_same(found, sent):
    for name in ("rows", "starts", "lengths", "token_ids", "samples", "table_changes", "row_params"):
        assert np.array_equal(getattr(found, name), getattr(sent, name)), name
        assert getattr(found, name).dtype == np.int32
    assert (found.is_plain, found.is_decode) == (sent.is_plain, sent.is_decode)
    assert (found.edits, found.num_logprobs) == (None, -1)


CHANGED = {"table_changes": np.arange(6, dtype=np.int32).reshape(2, 3).T,
           "row_params": np.arange(2 * ROW_PARAMS, dtype=np.int32).reshape(2, ROW_PARAMS).T}  # fmt: skip
STEPS = {
    "decode": step([1] * 256, decode=True),
    "decode with changes": step([1] * 3, decode=True, **CHANGED),
    "prompts": step([16000, 384], samples=[0, 1], **CHANGED),
    "mixed": step([1, 1, 7], samples=[1, 1, 0]),
    "filtered": step([1, 1], decode=True, any_filtered=True),
    "with log-probabilities": step([1, 1], num_logprobs=3),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_come_out_as_they_went_in(name):
    sent = STEPS[name]
    assert_same(StepDecoder().decode(b"".join(StepEncoder().encode(sent))), sent)


def test_decode_steps_are_small():
    assert len(b"".join(StepEncoder().encode(STEPS["decode"]))) == 32 + 2 * 4 * 256


def test_prompt_scores_go_without_their_owners():
    places, targets = np.array([0, 1], np.int32), np.array([5, 6], np.int32)
    sent = step([3], prompt_scores=PromptScores(places, targets, 2, [("somebody", 1, 2)]))
    found = StepDecoder().decode(b"".join(StepEncoder().encode(sent))).prompt_scores
    assert (found.places.tolist(), found.targets.tolist(), found.count, found.owners) == ([0, 1], [5, 6], 2, [])


def test_what_is_shared_travels_once():
    packed = np.arange(SharedPrefixes.size(8, 4), dtype=np.int32)
    first, second = SharedPrefixes(packed, 8, 4), SharedPrefixes(packed + 1, 8, 4)
    encoder, decoder = StepEncoder(), StepDecoder(8, 4)
    sizes, found = [], []
    for shared in (first, first, None, first, second):
        message = b"".join(encoder.encode(step([1, 1], decode=True, shared=shared)))
        sizes.append(len(message) > 4 * len(packed))
        found.append(decoder.decode(message).shared)
    assert sizes == [True, False, False, False, True]
    assert found[2] is None
    assert found[0] is found[1] is found[3]  # what a runner has sent to its device already
    assert [int(x.packed[3]) for x in (found[0], found[4])] == [3, 4]
    assert (found[4].max_batch, found[4].max_items) == (8, 4)


def test_step_of_a_wrong_length_is_refused():
    message = b"".join(StepEncoder().encode(STEPS["mixed"]))
    with pytest.raises(ValueError, match="a step of 21 values was sent as 22"):
        StepDecoder().decode(message + b"\0\0\0\0")


def test_large_prefill_goes_through_a_ring_of_the_usual_size():
    with ring(2, NUM_SLOTS, SLOT_BYTES) as (sender, receivers):
        sender.send(7, StepEncoder().encode(STEPS["prompts"]), never)
        for receiver in receivers:
            kind, message = receiver.receive()
            assert kind == 7
            assert len(message) > SLOT_BYTES
            assert_same(StepDecoder().decode(message), STEPS["prompts"])
