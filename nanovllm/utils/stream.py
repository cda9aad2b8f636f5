"""From files to a GPU at the rate at which files can be read.

Several threads read ahead, each into a pinned slab of its own; as soon as a slab is full, its copy to the device is
queued and, once that is done, the slab takes the next read. So host memory is a fixed number of slabs, whatever the
sizes of files and tensors, and reading, which is the slowest part, never waits for anything else.

Tensors that lie side by side are read and copied as one *span*.
"""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

SLABS = 8
SLAB_BYTES = 16 * 2**20
SPAN_BYTES = 64 * 2**20  # at most, unless one tensor is larger


@dataclass(frozen=True)
class Piece:
    """A tensor in a file."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in bytes
    end: int


@dataclass
class Span:
    """Tensors that lie side by side in a file."""

    file: Path
    start: int
    end: int
    pieces: list[Piece] = field(default_factory=list)

    def reads(self, slab_bytes: int) -> Iterator[tuple["Span", int, int]]:
        """(span, start, end) of each read, in bytes of the file."""
        for start in range(self.start, self.end, slab_bytes):
            yield self, start, min(start + slab_bytes, self.end)

    def tensors(self, content: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view of `content`, the span's bytes) of each tensor."""
        for piece in self.pieces:
            raw = content[piece.start - self.start : piece.end - self.start]
            if raw.storage_offset() % piece.dtype.itemsize:
                raw = raw.clone()  # views of another dtype have to be aligned, tensors in a file need not be
            yield piece.name, raw.view(piece.dtype).view(piece.shape)


class Slab:
    """Host memory of one read."""

    def __init__(self, num_bytes: int, device: torch.device):
        on_gpu = device.type == "cuda"
        self.content = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def read(self, file: Path, start: int, end: int) -> None:
        """Fill the slab's beginning with a part of a file, once its own copy is done."""
        if self._copied is not None:
            self._copied.synchronize()
        view = self.content.numpy().data[: end - start]
        with open(file, "rb", buffering=0) as source:
            source.seek(start)
            while view:
                count = source.readinto(view)
                if not count:
                    raise ValueError(f"{file}: ends after {end - len(view)} bytes, where {end} or more were expected")
                view = view[count:]

    def copy_to(self, target: torch.Tensor) -> None:
        """Queue the copy of the slab's beginning."""
        target.copy_(self.content[: len(target)], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(target.device))


def spans(pieces: list[Piece], span_bytes: int) -> Iterator[Span]:
    """Group the pieces, each file's in ascending order."""
    span: Span | None = None
    for piece in pieces:
        joins = span is not None and (piece.file, piece.start) == (span.file, span.end)
        if span is None or not joins or piece.end - span.start > span_bytes:
            if span is not None:
                yield span
            span = Span(piece.file, piece.start, piece.end)
        span.end = piece.end
        span.pieces.append(piece)
    if span is not None:
        yield span


def stream(
    pieces: list[Piece],
    device: torch.device,
    num_slabs: int = SLABS,
    slab_bytes: int = SLAB_BYTES,
    span_bytes: int = SPAN_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on `device`) of each piece, each file's in ascending order.

    Raises:
        ValueError: a file that cannot be read, or ends too early.
    """
    groups = list(spans(pieces, span_bytes))
    reads = (read for span in groups for read in span.reads(slab_bytes))
    pool = ThreadPoolExecutor(min(num_slabs, 2 * (os.cpu_count() or 1)), "nanovllm-read")
    queue: deque[tuple[Slab, Future[None]]] = deque()

    def read_next(slab: Slab) -> None:
        for span, start, end in islice(reads, 1):
            queue.append((slab, pool.submit(slab.read, span.file, start, end)))

    try:
        for _ in range(num_slabs):
            read_next(Slab(slab_bytes, device))
        for span in groups:
            content = torch.empty(span.end - span.start, dtype=torch.uint8, device=device)
            for _, start, end in span.reads(slab_bytes):
                slab, done = queue.popleft()
                done.result()
                slab.copy_to(content[start - span.start : end - span.start])
                read_next(slab)
            yield from span.tensors(content)
    except OSError as error:
        raise ValueError(f"{span.file}: cannot be read ({error})") from error
    finally:
        pool.shutdown(cancel_futures=True)
