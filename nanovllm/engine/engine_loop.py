"""What an engine does under its public surface: it takes turns, steps, mends what broke off, and ends.

An exception may come at any line, from a signal or a fault. So nothing is undone where it happens: a flag says that
something broke off, and the next use of the engine puts it in order again before anything else.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from nanovllm.config import Config
from nanovllm.engine.build import build_engine_parts
from nanovllm.engine.grammar import GrammarCompiler
from nanovllm.engine.inputs import InputProcessor
from nanovllm.engine.model_runner import StepResult
from nanovllm.engine.request import Output, Request, make_request, stop_checker
from nanovllm.engine.scheduler import Batch
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.stop_tokens import StopTokens
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.progress import Progress

WAKE_UP_S = 2e-4  # in which a thread wakes up for a lock that has become free

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound="EngineLoop")


class EngineLoop:
    """Requests, steps and lifecycle of one model; arguments and errors as of `LLMEngine`."""

    def __init__(self, model: Any, **options: Any):
        self.config = Config.build(model, options)
        parts = build_engine_parts(self.config)
        self.tokenizer = parts.tokenizer
        self.model_runner = parts.model_runner
        self.scheduler = parts.scheduler
        blocks = self.scheduler.block_manager
        self._grammars = GrammarCompiler(self.tokenizer, parts.vocab_size, self.scheduler.eos_token_ids)
        self._stop_tokens = StopTokens(self.tokenizer)
        self._inputs = InputProcessor(
            self.tokenizer,
            self._grammars,
            parts.vocab_size,
            self.scheduler.eos_token_ids,
            parts.max_model_len,
            blocks.num_blocks,
            blocks.block_size,
        )
        self._long_rope = parts.long_rope
        self._step_builder = parts.step_builder
        self._max_in_flight = 1 if parts.overlap else 0  # steps whose tokens the next step does not wait for
        self._in_flight: deque[tuple[Batch, StepResult]] = deque()
        self._next_seq_id = 0
        self._requests: dict[int, Request] = {}  # unfinished ones, by each of their sequences' ids
        self._finished: list[Request] = []  # of `add_request`, not yet reported by `step`
        self._abandoned: deque[Request] = deque()  # of calls that broke off, to be aborted by the next use
        self._num_ended = 0  # requests that finished or were aborted
        self._seconds = 0.0  # spent in steps
        self._lock: Any = threading.RLock()  # of whoever uses the engine
        self._waiting: set[int] = set()  # threads that wait for it
        self._pid = os.getpid()
        self._broken = False  # something broke off that left sequences and pool in disagreement
        self._closed = False

    # ---- lifecycle -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back the memory. Further use is an error; closing again is not.

        In a forked child this does nothing: everything belongs to the parent.
        """
        if os.getpid() != self._pid:
            return
        with self._hold():
            if self._closed:
                return
            self._closed = True
            self._requests.clear()
            self._finished.clear()
            self._abandoned.clear()
            self._in_flight.clear()
            self.model_runner.close()
            del self.model_runner, self.scheduler
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def __enter__(self: E) -> E:
        with self._open():
            return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the engine for this thread, in good order: whatever broke off before is mended and cleared away."""
        with self._hold():
            if self._closed:
                raise RuntimeError("this LLM has been closed")
            if self._broken:
                self._recover()
            self._abort_abandoned()
            yield

    @contextmanager
    def _hold(self) -> Iterator[None]:
        """Hold the engine for this thread. Threads take turns by steps, so several may generate at the same time."""
        if os.getpid() != self._pid:  # before the lock, which another thread may have held during the fork
            raise RuntimeError(
                f"this LLM belongs to process {self._pid} and cannot be used in a process forked from it "
                f"({os.getpid()}): make an LLM there, or start the process with multiprocessing's 'spawn' method"
            )
        if self._lock._is_owned():
            raise RuntimeError("this LLM is in the middle of a call: a signal handler cannot use it")
        thread = threading.get_ident()
        self._waiting.add(thread)
        if len(self._waiting) > 1:
            time.sleep(WAKE_UP_S)  # or a thread that steps and steps would take the lock again before who waits
        with self._lock:
            self._waiting.discard(thread)
            yield

    # ---- steps ---------------------------------------------------------------------------------------------

    def _enqueue(
        self,
        ids: list[int],
        params: SamplingParams,
        requests: list[Request],
        by_step: bool = False,
        batch: int | None = None,
    ) -> None:
        first_id = self._next_seq_id
        self._next_seq_id += params.n
        request = make_request(
            first_id,
            ids,
            params,
            self._inputs.max_len,
            self.config.seed,
            self.tokenizer,
            self._grammars,
            self._stop_tokens,
            self._long_rope,
        )
        request.by_step = by_step
        requests.append(request)
        for seq in request.sequences:
            seq.batch = batch
            self._requests[seq.seq_id] = request
            self.scheduler.add(seq)

    def _report(self, describe: Callable[[Request], T], result: Callable[[list[T], Batch], R]) -> R:
        """Run one step; the `result` of what it finished. What breaks off before that is out is reported by the next.

        Callers return this in the line that calls it: there is no later line of theirs to break off at.
        """
        reported: list[Request] = []
        try:
            with self._open():
                batch = self._step()
                outs = result([describe(request) for request in self._finished], batch)
                reported, self._finished = self._finished, []
            return outs
        except BaseException:
            self._finished[:0] = reported  # nobody else has them
            raise

    def _step(self) -> Batch:
        """Launch the next step, then take in the tokens of the oldest one in flight, if it is its turn.

        Whatever breaks off in here is mended by the next use of the engine.
        """
        began = time.perf_counter()
        self._broken = True
        batch = self.scheduler.schedule()
        if batch.items:
            self._in_flight.append((batch, self.model_runner.launch(self._step_builder.build(batch))))
        assert self._in_flight or self.scheduler.is_finished(), "no step can run and none is running"
        if self._in_flight and (not batch.items or len(self._in_flight) > self._max_in_flight):
            done, result = self._in_flight.popleft()
            token_ids = result.token_ids()
            result.record_prompt_scores()
            self._retire(self.scheduler.postprocess(done, token_ids, result.logprobs()))
        if self.scheduler.is_finished():
            self._in_flight.clear()  # rows that ran on after an end-of-sequence token: nobody asks for the results
        self._seconds += time.perf_counter() - began
        self._broken = False
        return batch

    def _retire(self, ended: Seq[Sequence]) -> None:
        """Forget ended sequences; requests of which none is left are finished."""
        for seq in ended:
            request = self._requests[seq.seq_id]
            if request.finished:
                self._num_ended += 1
                if request.by_step and request not in self._finished:
                    self._finished.append(request)
            del self._requests[seq.seq_id]

    def _recover(self) -> None:
        """After anything that broke off: all unfinished sequences wait again, with the tokens they have.

        A recovery that breaks off itself is done again from the start.
        """
        self._in_flight.clear()
        sequences = [self._sequence(seq_id) for seq_id in self._requests]
        unfinished = [seq for seq in sequences if seq.status is not Status.FINISHED]
        self.scheduler.reset(unfinished)
        for seq in unfinished:
            checker = stop_checker(self.tokenizer, seq.params, self._stop_tokens)
            self.scheduler.settle(seq, checker, self._grammars.start(seq.params))
        self._retire([seq for seq in sequences if seq.status is Status.FINISHED])
        self._broken = False

    def _sequence(self, seq_id: int) -> Sequence:
        request = self._requests[seq_id]
        return request.sequences[seq_id - request.request_id]

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[Output]:
        """Step until all of `requests` are finished; their outputs, made while others' steps still run."""
        outputs: dict[int, Output] = {}
        left, num_ended = dict(enumerate(requests)), -1
        with Progress(len(requests), use_tqdm) as progress:
            while left:
                batch, ended = self._step_for(left.values()), []
                if self._num_ended != num_ended:  # by whatever thread
                    num_ended = self._num_ended
                    ended = [i for i, request in left.items() if request.finished]
                for i in ended:
                    outputs[i] = left.pop(i).output()
                progress.update(batch, len(ended))
        return [outputs[i] for i in range(len(requests))]

    def _step_for(self, requests: Collection[Request]) -> Batch:
        """One step, unless another thread's steps finished all of `requests`."""
        with self._open():
            return Batch([], []) if all(request.finished for request in requests) else self._step()

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            self._abort(self._abandoned[0])
            self._abandoned.popleft()

    def _abort(self, request: Request) -> None:
        """End what is unfinished of a request and forget it; to be done again if it breaks off."""
        self._broken = True
        for seq in request.sequences:
            if seq.status is not Status.FINISHED:
                self.scheduler.finish(seq, "abort")
            self._requests.pop(seq.seq_id, None)
        self._num_ended += 1
        if request in self._finished:
            self._finished.remove(request)
        self._broken = False
