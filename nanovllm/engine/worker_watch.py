"""What rank 0 knows of its workers: what they reported, and that one of them ended, and by what."""

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from nanovllm.engine.worker import BEGUN, FAILED, REFUSED, REPORT

SETTLE_S = 0.3  # in which others that fail with the first one have said so


class WorkerError(RuntimeError):
    """A worker ended."""


@dataclass(frozen=True)
class Failure:
    """Why a worker is no more."""

    rank: int
    text: str
    killed: bool = False  # by a signal: never because of another rank
    refused: bool = False  # it says that something does not fit

    def error(self) -> Exception:
        text = f"tensor-parallel rank {self.rank} {self.text}"
        return ValueError(text) if self.refused else WorkerError(text)


class WorkerWatch:
    """A thread that listens to the workers. When one fails it calls `abort`, so that nobody waits for it in vain.

    Args:
        processes: started, of ranks 1, 2, ...
        reports: the reading end of each one's pipe.
    """

    def __init__(self, processes: Sequence[BaseProcess], reports: Sequence[Connection]):
        self._processes = processes
        self._reports = reports
        self._said: dict[int, dict[int, tuple[int, str]]] = {rank: {} for rank in range(1, len(processes) + 1)}
        self._failures: list[Failure] = []
        self._changed = threading.Condition()
        self._stop_read, self._stop_write = Pipe(duplex=False)
        self.abort: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._listen, name="nanovllm-workers", daemon=True)
        self._thread.start()

    def wait_for(self, kind: int) -> list[tuple[int, str]]:
        """(number, text) of every worker's report of that kind, by rank.

        Raises:
            WorkerError, ValueError: a worker failed, and why.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failures or all(kind in said for said in self._said.values()))
            if not self._failures:
                return [said[kind] for said in self._said.values()]
        failure = self.failure()
        assert failure is not None
        raise failure.error()

    def has_failed(self) -> bool:
        return bool(self._failures)

    def failure(self, timeout: float = 0.0) -> Failure | None:
        """The failure that others follow from, if there is one within `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._failures, timeout):
                return None
            self._changed.wait_for(lambda: any(failure.killed for failure in self._failures), SETTLE_S)
            return next((failure for failure in self._failures if failure.killed), self._failures[0])

    def stop(self) -> None:
        """Listen no more: from here on workers may end."""
        self._stop_write.close()
        if threading.current_thread() is not self._thread:  # the collector may run anywhere
            self._thread.join()
        for report in self._reports:
            report.close()

    def _listen(self) -> None:
        ranks = range(1, len(self._processes) + 1)
        pipes = dict(zip(self._reports, ranks, strict=True))
        sentinels = {process.sentinel: rank for rank, process in zip(ranks, self._processes, strict=True)}
        while True:
            ready = wait([self._stop_read, *pipes, *sentinels])
            if self._stop_read in ready:
                self._stop_read.close()
                return
            for report in [report for report in pipes if report in ready]:
                if not self._hear(pipes[report], report):
                    del pipes[report]
            for sentinel in [sentinel for sentinel in sentinels if sentinel in ready]:
                self._end(sentinels.pop(sentinel))
            if self._stop_write.closed:
                return  # `stop` ran in this thread

    def _hear(self, rank: int, report: Connection) -> bool:
        """Take in one report; whether there can be more."""
        try:
            message = report.recv_bytes()
        except (EOFError, OSError):
            return False
        kind, number = REPORT.unpack_from(message)
        text = message[REPORT.size :].decode()
        if kind == FAILED:
            self._fail(Failure(rank, text, refused=number == REFUSED))
            return True
        with self._changed:
            self._said[rank][kind] = (number, text)
            self._changed.notify_all()
        return True

    def _end(self, rank: int) -> None:
        process, report = self._processes[rank - 1], self._reports[rank - 1]
        while not report.closed and report.poll() and self._hear(rank, report):
            pass  # its last words
        if any(failure.rank == rank for failure in self._failures):
            return
        process.join()
        code = process.exitcode or 0
        if code < 0:
            text = f"(process {process.pid}) was killed by {signal.Signals(-code).name}"
        else:
            text = f"(process {process.pid}) ended with exit code {code}"
        if BEGUN not in self._said[rank]:
            text += (
                " before it began. It runs the program's main script once more, up to its "
                '`if __name__ == "__main__":`; what makes the LLM has to stand under such a line'
            )
        self._fail(Failure(rank, text, killed=code < 0))

    def _fail(self, failure: Failure) -> None:
        with self._changed:
            self._failures.append(failure)
            self._changed.notify_all()
        if self.abort is not None:
            self.abort()
