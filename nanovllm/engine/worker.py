"""A process of its own for each rank but the first: it loads its share and runs the steps that rank 0 sends.

What a worker does is written here; from rank 0 come numbers (a kind and arrays), never code or the name of any. What it
says goes back through a pipe as a kind and a text or a number. It ends with its parent, whatever that one ends by.
"""

import logging
import os
import shutil
import signal
import struct
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.build import build_rank
from nanovllm.engine.channel import ChannelClosed, Receiver
from nanovllm.engine.choices import choose_device
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.step_message import StepDecoder
from nanovllm.layers.parallel import Ranks
from nanovllm.models.registry import model_spec
from nanovllm.utils.checkpoint import open_checkpoint

# What rank 0 sends.
CLOSE, CONNECT, NUM_BLOCKS, STEP = range(4)
# What a worker reports: that it runs, that its weights are loaded, its room for KV, that it takes steps, its failure.
BEGUN, LOADED, ROOM, STARTED, FAILED = range(5)
REPORT = struct.Struct("<Iq")  # kind, a number; a text follows
BLOCKS = struct.Struct("<q")
REFUSED = 1  # the number of a FAILED whose text says what does not fit; others have a traceback

CONNECT_S = 60  # in which ranks that are all ready have to find each other
COLLECTIVE_S = 1800  # a rank that is gone is noticed otherwise
LOOK_S = 1.0  # between looks whether the parent is still the parent


@dataclass(frozen=True)
class Job:
    """What a worker is started with."""

    config: Config  # with the model's place on disk
    rank: int
    channel: str  # the name of the shared memory
    parent_pid: int
    doorbell: Connection
    reports: Connection

    @property
    def size(self) -> int:
        return self.config.tensor_parallel_size


def connect_ranks(folder: str, rank: int, size: int, device: torch.device) -> Any:
    """A process group of its own (not torch's default one), through a file: no port is chosen by anybody."""
    c10d: Any = torch.distributed
    group: Any
    store = c10d.FileStore(os.path.join(folder, "ranks"), size)
    if device.type == "cpu":
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=CONNECT_S)
        group = c10d.ProcessGroupGloo(store, rank, size, options)
    else:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=COLLECTIVE_S)
        with _default_environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):  # its thread would end the whole process
            group = c10d.ProcessGroupNCCL(store, rank, size, options)
    Ranks(rank, size, group).all_reduce(torch.ones(1, device=device))  # NCCL connects with the first one
    group._set_default_timeout(timedelta(seconds=COLLECTIVE_S))
    return group


@contextmanager
def _default_environment(name: str, value: str) -> Iterator[None]:
    """For what is read there only, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def run_worker(job: Job) -> None:
    """The whole life of a worker's process."""
    # Ctrl-C and the end of a session reach all processes of a terminal: rank 0 decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    logging.getLogger("nanovllm").setLevel(logging.ERROR)  # what there is to say about a model, rank 0 says
    folders: list[str] = []
    threading.Thread(target=_end_with_parent, args=(job, folders), name="nanovllm-parent", daemon=True).start()
    code = 0
    try:
        receiver = Receiver(job.channel, job.rank - 1, job.doorbell, job.size - 1)
        _report(job, BEGUN)
        started = _start(job, receiver, folders)
        if started is not None:
            _take_steps(*started, receiver)
    except ChannelClosed:
        pass  # the parent ended
    except BaseException:
        code = 1
        _report(job, FAILED, 0, "failed:\n" + traceback.format_exc())
    os._exit(code)  # without waiting for what libraries do at the end: other ranks may be gone


def _start(job: Job, receiver: Receiver, folders: list[str]) -> tuple[ModelRunner, StepDecoder] | None:
    """Build this rank; None when rank 0 or this rank gives it up. `folders` keeps what may have to be removed."""
    ranks = Ranks(job.rank, job.size)

    def connect(device: torch.device) -> None:
        _report(job, LOADED)
        folders.append(_expect(receiver, CONNECT).decode())
        ranks.group = connect_ranks(folders[0], job.rank, job.size, device)

    try:
        device = choose_device(job.config.device, ranks)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // job.size))
        checkpoint = open_checkpoint(job.config.model)
        rank = build_rank(job.config, checkpoint, model_spec(checkpoint.config()), ranks, connect)
        _report(job, ROOM, rank.num_blocks, rank.memory)
        runner = rank.runner(*BLOCKS.unpack(_expect(receiver, NUM_BLOCKS)))
        rank.capture_graphs(runner)
    except ValueError as error:
        _report(job, FAILED, REFUSED, f"cannot start: {error}")
        return None
    _report(job, STARTED)
    shared = rank.attention.shared
    return runner, StepDecoder(shared.max_batch, shared.max_items) if shared is not None else StepDecoder()


def _expect(receiver: Receiver, wanted: int) -> bytes:
    kind, message = receiver.receive()
    if kind != wanted:
        raise ChannelClosed
    return message


def _take_steps(runner: ModelRunner, decoder: StepDecoder, receiver: Receiver) -> None:
    while True:
        kind, message = receiver.receive()
        if kind != STEP:
            return
        runner.launch(decoder.decode(message))


def _report(job: Job, kind: int, number: int = 0, text: str = "") -> None:
    with suppress(OSError):  # nobody is there to hear it
        job.reports.send_bytes(REPORT.pack(kind, number) + text.encode())


def _end_with_parent(job: Job, folders: list[str]) -> None:
    """End at once when the parent is gone, even from the middle of a collective that will never come through."""
    parent = parent_process()
    assert parent is not None
    while not wait([parent.sentinel], LOOK_S) and os.getppid() == job.parent_pid:
        pass
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
