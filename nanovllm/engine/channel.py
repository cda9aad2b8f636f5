"""From rank 0 to the other ranks: a ring of slots in shared memory, and a pipe to each reader that says "one more".

A message is cut over as many slots as it needs, so that any size goes through. In each slot:

    | number of the fragment | length | kind of the message | whether more of it follows | bytes ... |

The reader looks at a slot only after it took a byte out of its pipe, and then acknowledges the fragment in a word of
its own: who writes waits for room until every reader has acknowledged what a slot held before. The pipe is what a
reader sleeps on, what makes the slot's bytes visible to it (a system call on both sides), and, at its end, the sign
that nobody writes any more.
"""

import os
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

NUM_SLOTS = 16
SLOT_BYTES = 2**16
LINE = 64  # bytes of a cache line: each reader's word has one for itself
HEADER = struct.Struct("<QIHH")  # number, length, kind, more
WORD = struct.Struct("<Q")
FIRST_WAIT_S, LONGEST_WAIT_S = 2e-5, 1e-3  # between looks for room


class ChannelClosed(Exception):
    """Nobody is at the other end."""


class ChannelBroken(Exception):
    """What lies in the shared memory is not what comes next."""


def slot_offset(num_readers: int, number: int, num_slots: int, slot_bytes: int) -> int:
    """Where the fragment of that number lies."""
    return num_readers * LINE + number % num_slots * slot_bytes


class Sender:
    """Makes the shared memory, under a name that no other engine has.

    Args:
        doorbells: the writing end of each reader's pipe.
        num_slots, slot_bytes: of the ring.
    """

    def __init__(self, doorbells: Sequence[Connection], num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES):
        assert slot_bytes > HEADER.size
        self._doorbells = doorbells
        self._ring = (num_slots, slot_bytes)
        self._number = 0  # of the next fragment
        size = len(doorbells) * LINE + num_slots * slot_bytes
        self._memory = SharedMemory(f"nvllm-{os.getpid():x}-{secrets.token_hex(5)}", create=True, size=size)
        self._buffer: Any = self._memory.buf
        self._linked = True

    @property
    def name(self) -> str:
        return self._memory.name

    def send(self, kind: int, parts: Sequence[bytes], wait: Callable[[], None]) -> None:
        """Send one message.

        Args:
            kind: a number of 16 bits.
            parts: the message is these bytes one after the other.
            wait: called again and again while there is no room; raises when there will never be.
        """
        message = b"".join(parts)
        room = self._ring[1] - HEADER.size
        for start in range(0, max(len(message), 1), room):
            end = start + room
            self._put(kind, message[start:end], end < len(message), wait)

    def _put(self, kind: int, content: bytes, more: bool, wait: Callable[[], None]) -> None:
        readers, number, buffer = len(self._doorbells), self._number, self._buffer
        pause = FIRST_WAIT_S
        while number - self._slowest() >= self._ring[0]:
            wait()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_WAIT_S)
        start = slot_offset(readers, number, *self._ring)
        HEADER.pack_into(buffer, start, number, len(content), kind, more)
        start += HEADER.size
        buffer[start : start + len(content)] = content
        self._number += 1
        for doorbell in self._doorbells:
            os.write(doorbell.fileno(), b"\0")  # never more than a byte a slot: a pipe always has room for those

    def _slowest(self) -> int:
        """Fragments that every reader has taken."""
        return min(WORD.unpack_from(self._buffer, reader * LINE)[0] for reader in range(len(self._doorbells)))

    def unlink(self) -> None:
        """Take the name away, once all readers have the memory: nothing is left of it when the processes end."""
        if self._linked:
            self._linked = False
            self._memory.unlink()

    def close(self) -> None:
        self.unlink()
        self._memory.close()
        for doorbell in self._doorbells:
            doorbell.close()


class Receiver:
    """One reader's end.

    Args:
        name: of the sender's shared memory.
        reader: this one's number, from 0.
        doorbell: the reading end of its pipe.
        num_readers, num_slots, slot_bytes: the sender's.
    """

    def __init__(
        self,
        name: str,
        reader: int,
        doorbell: Connection,
        num_readers: int,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ):
        self._memory = SharedMemory(name)
        self._buffer: Any = self._memory.buf
        self._reader = reader
        self._doorbell = doorbell
        self._num_readers = num_readers
        self._ring = (num_slots, slot_bytes)
        self._number = 0

    def receive(self) -> tuple[int, bytes]:
        """The next message: (kind, bytes). Waits for it.

        Raises:
            ChannelClosed: the sender is gone.
            ChannelBroken: the next fragment is not the one that it should be.
        """
        kind, content, more = self._take()
        if not more:
            return kind, content
        parts = [content]
        while more:
            next_kind, content, more = self._take()
            if next_kind != kind:
                raise ChannelBroken(f"a message of kind {kind} goes on as kind {next_kind}")
            parts.append(content)
        return kind, b"".join(parts)

    def _take(self) -> tuple[int, bytes, bool]:
        if not os.read(self._doorbell.fileno(), 1):
            raise ChannelClosed
        buffer, start = self._buffer, slot_offset(self._num_readers, self._number, *self._ring)
        number, length, kind, more = HEADER.unpack_from(buffer, start)
        start += HEADER.size
        if number != self._number or length > self._ring[1] - HEADER.size:
            raise ChannelBroken(f"fragment {self._number} was expected, number {number} of {length} bytes is there")
        content = bytes(buffer[start : start + length])
        self._number += 1
        WORD.pack_into(buffer, self._reader * LINE, self._number)
        return kind, content, bool(more)

    def close(self) -> None:
        self._memory.close()
        self._doorbell.close()
