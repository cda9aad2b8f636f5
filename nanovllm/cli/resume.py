"""Output that a kill at any moment cannot spoil, and the way on from there.

Lines are appended to OUTPUT.partial, always as plain JSON lines. Every second or so a commit makes them last: first
they are synced to the disk, then one line of OUTPUT.journal says how long the partial file is now and which lines of
the input are in it. A new start believes the journal alone: it cuts both files off after the last commit and leaves out
the lines that are done. OUTPUT itself appears whole, by a rename, when every line is done; the journal stays beside it,
so that the same command finds nothing left to do. What the journal says of the end:

    last entry    OUTPUT.partial    OUTPUT     means
    a commit      there             -          go on
    "final"       there             -          all lines done, killed before the rename
    "final"       gone              there      complete
    any           gone              gone       the user deleted the results: start again
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import xxhash

from nanovllm.cli.records import STREAM, convert, is_parquet

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two commands from the same output there
    fcntl = None  # type: ignore[assignment]

COMMIT_SECONDS = 1.0


@dataclass
class Totals:
    """Sums over all lines out, those of earlier starts included. `size` is the share of the input they came from."""

    lines: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    size: int = 0

    def add(self, result: "Result") -> None:
        self.lines += 1
        self.errors += result.error
        self.prompt_tokens += result.prompt_tokens
        self.output_tokens += result.output_tokens
        self.size += result.size


@dataclass(frozen=True)
class Result:
    """One line out, and what it adds to the totals."""

    index: int
    size: int
    data: bytes
    error: bool
    prompt_tokens: int
    output_tokens: int


@dataclass
class Done:
    """A set of line numbers in which most are below a common mark: all below `low`, and those in `above`."""

    low: int = 0
    above: set[int] = field(default_factory=set)

    def add_range(self, start: int, end: int) -> None:
        if start > self.low:
            self.above.update(range(start, end))
            return
        self.low = max(self.low, end)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1

    def __contains__(self, index: int) -> bool:
        return index < self.low or index in self.above


class StreamOutput:
    """Lines to standard output, a pipe or a device, which cannot be taken up again."""

    complete = False

    def __init__(self, file: IO[bytes]):
        self.done = Done()
        self.totals = Totals()
        self._file = file

    def write(self, result: Result) -> None:
        self._file.write(result.data)
        self.totals.add(result)

    def commit(self, now: bool = False) -> None:
        self._file.flush()  # whoever reads waits for it

    def finish(self) -> None:
        self.commit()

    def close(self) -> None:
        pass


class FileOutput:
    """Lines to a file, by way of a partial file and a journal.

    Args:
        path: the file.
        fingerprint: everything that the lines out depend on; "input" is None where the input cannot be read again.
        restart: drop what an earlier start left.

    Raises:
        ValueError: what lies there belongs to another input or to other options, or another process is writing it.
    """

    def __init__(self, path: str, fingerprint: dict[str, Any], restart: bool):
        self.path = Path(os.path.realpath(path))  # a rename would replace a symbolic link, not what it points to
        self.partial = Path(f"{self.path}.partial")
        self._fingerprint = json.loads(json.dumps(fingerprint, default=str))
        self.done = Done()
        self.totals = Totals()
        self.complete = False
        self._written: list[int] = []  # since the last commit
        self._last_commit = time.monotonic()
        self._journal = open_locked(Path(f"{self.path}.journal"))
        try:
            size = None if restart else self._load()
            self._lines = None if self.complete else self._open_partial(size)
        except BaseException:
            self._journal.close()
            raise

    def write(self, result: Result) -> None:
        assert self._lines is not None
        self._lines.write(result.data)
        self._written.append(result.index)
        self.totals.add(result)

    def commit(self, now: bool = True) -> None:
        """Make the lines so far last. `now=False`: only when the last commit is a while ago."""
        if not self._written or not (now or time.monotonic() - self._last_commit > COMMIT_SECONDS):
            return
        assert self._lines is not None
        sync(self._lines)  # before the journal speaks of them
        self._append({"bytes": self._lines.tell(), "done": ranges(self._written), "totals": vars(self.totals)})
        self._written.clear()
        self._last_commit = time.monotonic()

    def finish(self) -> None:
        """Every line is written: let the output appear."""
        if self._lines is None:
            return
        self.commit()
        self._lines.close()
        self._append({"final": True})
        if self.path.name.endswith(".gz") or is_parquet(self.path.name):
            packed = Path(f"{self.path}.tmp")
            convert(self.partial, packed)
            with open(packed, "rb+") as file:
                sync(file)
            os.replace(packed, self.path)
            self.partial.unlink()
        else:
            os.replace(self.partial, self.path)

    def close(self) -> None:
        """Commit what is there and let go of the files."""
        if self._lines is not None and not self._lines.closed:
            self.commit()
            self._lines.close()
        self._journal.close()

    def _load(self) -> int | None:
        """Take in the journal and cut off its torn end. Bytes of the partial file to keep, or None to start anew."""
        known: dict[str, Any] = {}  # the newest value under each name
        end = 0
        for entry, position in whole_entries(self._journal):
            end = position
            known.update(entry)
            for start, stop in entry.get("done", ()):
                self.done.add_range(start, stop)
        self._journal.seek(end)
        self._journal.truncate()
        there = self.partial.exists()
        changed = self._changed(known.get("fingerprint", {}))
        if "bytes" in known and changed and (there or self.path.exists()):
            raise ValueError(
                f"{self.path} was begun with another {', '.join(changed)}; the same command goes on with it, "
                "--restart starts again"
            )
        if ("bytes" in known and there) or ("final" in known and self.path.exists()):
            self.complete = not there
            self.totals = Totals(**known.get("totals", {}))
            return known.get("bytes", 0)
        if self.path.exists() and changed:  # else it is what an earlier --restart was about to replace
            raise ValueError(f"{self.path} exists and is not of this command; --restart replaces it")
        if there and not known:
            raise ValueError(f"{self.partial} has lost its journal; --restart drops it")
        self.done = Done()
        return None

    def _changed(self, theirs: dict[str, Any]) -> list[str]:
        """What is not as it was. A stream is never the same again."""
        mine = self._fingerprint
        changed = {name for name in theirs | mine if theirs.get(name) != mine.get(name)}
        return sorted(changed | ({"input"} if mine["input"] is None else set()))

    def _open_partial(self, size: int | None) -> IO[bytes]:
        if size is None:
            self._journal.truncate(0)
            self._journal.seek(0)
            self.partial.unlink(missing_ok=True)
            self._append({"fingerprint": self._fingerprint})
            return open(self.partial, "wb")
        if self.partial.stat().st_size < size:
            raise ValueError(f"{self.partial} is shorter than its journal says; --restart starts again")
        os.truncate(self.partial, size)
        return open(self.partial, "ab")

    def _append(self, entry: dict[str, Any]) -> None:
        self._journal.write(json.dumps(entry).encode() + b"\n")
        sync(self._journal)


def open_locked(path: Path) -> IO[bytes]:
    """The file for reading and writing, created if need be, and held against other processes."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "rb+")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ValueError(f"another process is writing {str(path).removesuffix('.journal')}") from error
    return file


def whole_entries(journal: IO[bytes]) -> Iterator[tuple[dict[str, Any], int]]:
    """(entry, where it ends), up to one that a kill cut short."""
    end = 0
    for line in journal:
        try:
            entry = json.loads(line)
        except ValueError:
            return
        if not line.endswith(b"\n"):
            return
        end += len(line)
        yield entry, end


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Sorted [start, end) ranges that hold just these numbers."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def content_hash(path: str) -> str | None:
    """Hash of a file's content; None for a stream."""
    if path == STREAM or not os.path.isfile(path):
        return None
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def open_output(
    path: str, stdout: IO[bytes], fingerprint: Callable[[], dict[str, Any]], restart: bool
) -> StreamOutput | FileOutput:
    """Where lines go: `path`, or `stdout` for "-"."""
    if path == STREAM:
        return StreamOutput(stdout)
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe, /dev/null: a rename would replace it
        if os.path.isdir(path):
            raise ValueError(f"{path} is a folder")
        return StreamOutput(open(path, "wb"))
    return FileOutput(path, fingerprint(), restart)
