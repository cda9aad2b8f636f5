"""Rank 0 of several: it starts the workers, sends each step before it runs its own share, and ends them.

A step that breaks off half-way on any rank leaves the ranks at different places, from where nothing can go on: then all
workers are ended, the caller gets the cause, and so does every later use of the engine. An interrupt from the keyboard
is no such case: it waits for the end of `launch`.
"""

import atexit
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import torch

from nanovllm.config import Config
from nanovllm.engine.build import RankParts, build_rank
from nanovllm.engine.channel import Sender
from nanovllm.engine.model_runner import ModelRunner, StepResult
from nanovllm.engine.step import StepInput
from nanovllm.engine.step_message import StepEncoder
from nanovllm.engine.worker import (
    BLOCKS,
    CLOSE,
    CONNECT,
    LOADED,
    NUM_BLOCKS,
    ROOM,
    STARTED,
    STEP,
    Job,
    connect_ranks,
    run_worker,
)
from nanovllm.engine.worker_watch import WorkerError, WorkerWatch
from nanovllm.layers.parallel import Ranks
from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.split import rank_spec
from nanovllm.utils.checkpoint import Checkpoint

logger = logging.getLogger("nanovllm")

END_S = 5.0  # that workers have to end by themselves
CAUSE_S = 3.0  # that a failed worker has to be noticed after a step failed here


def build_ranks(config: Config, checkpoint: Checkpoint, spec: DecoderSpec) -> tuple[RankParts, ModelRunner, int]:
    """Start the other ranks and load this one's share meanwhile; (rank 0's parts, its runner, KV blocks of each rank).

    Raises:
        ValueError: a model that cannot be split so, or anything that one rank does not have room for.
        RuntimeError: a worker ended, and why.
    """
    ranks = Ranks(0, config.tensor_parallel_size)
    rank_spec(spec, ranks.size)
    workers = Workers(replace(config, model=str(checkpoint.path)))
    try:
        return _build_ranks(config, checkpoint, spec, ranks, workers)
    except (ValueError, TypeError, WorkerError):
        workers.end()
        raise
    except BaseException as error:
        cause = workers.watch.failure(CAUSE_S if isinstance(error, Exception) else 0)
        workers.end()
        if cause is not None:
            raise cause.error() from error
        raise


def _build_ranks(
    config: Config, checkpoint: Checkpoint, spec: DecoderSpec, ranks: Ranks, workers: "Workers"
) -> tuple[RankParts, ModelRunner, int]:
    def connect(device: torch.device) -> None:
        workers.watch.wait_for(LOADED)
        workers.send(CONNECT, [workers.make_folder().encode()])
        ranks.group = connect_ranks(workers.folders[0], 0, ranks.size, device)
        if device.type == "cuda":  # kernels that wait for a rank that is gone end when the group is aborted
            workers.watch.abort = ranks.group.abort
        else:
            workers.remove_folders()  # NCCL's threads look into it now and then; gloo's do not

    rank = build_rank(config, checkpoint, spec, ranks, connect)
    rooms = [(rank.num_blocks, rank.memory), *workers.watch.wait_for(ROOM)]
    for number, (blocks, memory) in enumerate(rooms):
        logger.info("rank %d: %d KV blocks; %s", number, blocks, memory)
    num_blocks = min(blocks for blocks, _ in rooms)
    workers.send(NUM_BLOCKS, [BLOCKS.pack(num_blocks)])
    runner = rank.runner(num_blocks, partial(TensorParallelRunner, workers))
    rank.capture_graphs(runner)
    workers.watch.wait_for(STARTED)
    workers.sender.unlink()  # all have it: nothing is left that could outlive the processes
    return rank, runner, num_blocks


class Workers:
    """The processes of ranks 1, 2, ..., and all that has to go when they go.

    Args:
        config: with the model's place on disk; what all ranks build themselves from.
    """

    def __init__(self, config: Config):
        context = multiprocessing.get_context("spawn")
        count = config.tensor_parallel_size - 1
        bells = [context.Pipe(duplex=False) for _ in range(count)]
        reports = [context.Pipe(duplex=False) for _ in range(count)]
        self.sender = Sender([write for _, write in bells])
        self.folders: list[str] = []
        self.processes: list[BaseProcess] = []
        self.ended = ""  # why, if it was not `close`
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # children begin so, too: see `run_worker`
        try:
            for rank, ((bell, _), (_, report)) in enumerate(zip(bells, reports, strict=True), 1):
                job = Job(config, rank, self.sender.name, os.getpid(), bell, report)
                name = f"nanovllm-rank-{rank}"
                process = context.Process(target=run_worker, args=(job,), name=name, daemon=True)
                process.start()
                self.processes.append(process)
                bell.close()
                report.close()
        finally:
            self.watch = WorkerWatch(self.processes, [read for read, _ in reports[: len(self.processes)]])
            parts = (os.getpid(), self.processes, self.watch, self.sender, self.folders)
            self._finalizer = weakref.finalize(self, _shut_down, *parts)
            # When the interpreter exits, this comes before multiprocessing waits for its children.
            self._finalizer.atexit = False
            atexit.register(self._finalizer)
            if len(self.processes) < count:
                self.end()
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def send(self, kind: int, parts: Sequence[bytes]) -> None:
        self.sender.send(kind, parts, self.check)

    def check(self) -> None:
        """Raises RuntimeError when a worker failed, or the workers were ended."""
        if self.ended:
            raise RuntimeError(f"this LLM has lost its workers and cannot go on: {self.ended}")
        if self.watch.has_failed():
            failure = self.watch.failure()
            assert failure is not None
            raise failure.error()

    def break_off(self, error: BaseException) -> NoReturn:
        """End the workers after `error` in a step; raises what caused it, or it."""
        wait_s = CAUSE_S if isinstance(error, Exception) and not isinstance(error, WorkerError) else 0.0
        cause = self.watch.failure(wait_s) if not self.ended else None
        self.ended = self.ended or f"a step broke off with {type(error).__name__}: {error}"
        if cause is not None:
            self.ended = str(cause.error())
        self.end()
        if cause is not None and isinstance(error, Exception) and not isinstance(error, WorkerError):
            raise cause.error() from error
        raise error

    def make_folder(self) -> str:
        """Where ranks find each other. Not made before all are there, who remove it if this process is killed."""
        self.folders.append(tempfile.mkdtemp(prefix=f"nanovllm-{os.getpid()}-"))
        return self.folders[0]

    def remove_folders(self) -> None:
        _remove(self.folders)

    def end(self) -> None:
        """At once."""
        self.ended = self.ended or "it broke off while it started"
        if self._finalizer.alive:
            for process in self.processes:
                process.kill()
        self.close()

    def close(self) -> None:
        """Let the workers end, and give everything back. Once is enough."""
        self._finalizer()
        atexit.unregister(self._finalizer)


def _shut_down(pid: int, processes: list[BaseProcess], watch: WorkerWatch, sender: Sender, folders: list[str]) -> None:
    if os.getpid() != pid:
        return  # in a forked child: all of it is the parent's
    watch.stop()
    with suppress(OSError):  # there is no room, or a worker has ended already
        sender.send(CLOSE, [], _raise_full)
    deadline = time.monotonic() + END_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    sender.close()
    _remove(folders)


def _remove(folders: list[str]) -> None:
    while folders:
        shutil.rmtree(folders[-1], ignore_errors=True)
        folders.pop()


def _raise_full() -> None:
    raise BlockingIOError("no room")


@contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Take Ctrl-C at the end. A second one comes through at once."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    taken: list[tuple[Any, Any]] = []

    def take(number: Any, frame: Any) -> None:
        taken.append((number, frame))
        if len(taken) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, take)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if taken:
        before(*taken[0])


@dataclass(frozen=True)
class RankResult(StepResult):
    """Waits for tokens as long as all ranks are there to make them."""

    workers: Workers | None = None

    def token_ids(self) -> list[int]:
        assert self.workers is not None
        try:
            ids = super().token_ids()
            self.workers.check()  # what was waited for ends early when a rank is gone
            return ids
        except Exception as error:  # an interrupt is none: the step goes on without anybody who waits
            self.workers.break_off(error)


class TensorParallelRunner(ModelRunner):
    """Rank 0's runner.

    Args:
        workers: the other ranks.
        args: as for `ModelRunner`.
    """

    def __init__(self, workers: Workers, *args: Any):
        super().__init__(*args)
        self._workers = workers
        self._encoder = StepEncoder()

    def launch(self, inputs: StepInput) -> StepResult:
        with interrupts_put_off():
            try:
                self._workers.check()
                self._workers.send(STEP, self._encoder.encode(inputs))
                result = super().launch(inputs)
            except BaseException as error:
                self._workers.break_off(error)
        fields = {name: getattr(result, name) for name in StepResult.__dataclass_fields__}
        return RankResult(**fields, workers=self._workers)

    def close(self) -> None:
        super().close()
        self._workers.close()
        group = self.model.ranks.group
        if self.device.type == "cuda":
            group.abort()  # without it, freeing the group waits for the others
