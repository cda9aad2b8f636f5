"""The engine: requests in, completions out."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from nanovllm.config import Config
from nanovllm.engine.build import build_engine_parts
from nanovllm.engine.grammar import GrammarCompiler
from nanovllm.engine.inputs import InputProcessor, Prompt, params_list, prompt_list
from nanovllm.engine.model_runner import StepResult
from nanovllm.engine.request import Output, Request, StreamOutput, make_request, stop_checker
from nanovllm.engine.scheduler import Batch
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.stop_tokens import StopTokens
from nanovllm.sampling_params import SamplingParams, checked_int
from nanovllm.utils.collector import collector_frozen, collector_off
from nanovllm.utils.progress import Progress

WAKE_UP_S = 2e-4  # in which a thread wakes up for a lock that has become free

Messages = Seq[Mapping[str, Any]]
T = TypeVar("T")
R = TypeVar("R")


class LLMEngine:
    """Generates text with one model.

    Args:
        model: a folder with a checkpoint, a `.gguf` file (or a folder holding one), or a Hub id.
        options: see `Config`.

    Raises:
        TypeError, ValueError: an option, a checkpoint or a machine that does not fit, by name.
    """

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

    # ---- requests ------------------------------------------------------------------------------------------

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one request.

        Args:
            prompt: a text, or token ids.
            sampling_params: default `SamplingParams()`.

        Returns:
            The id under which `step` reports it.

        Raises:
            TypeError, ValueError: a prompt or parameters that can never run.
        """
        requests: list[Request] = []
        try:
            with self._open():
                ids = self._inputs.token_ids(prompt, "request")
                self._enqueue(ids, self._inputs.params(sampling_params, "request"), requests, by_step=True)
            return requests[0].request_id
        except BaseException:
            self._abandoned.extend(requests)  # its id never reached the caller
            raise

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step.

        Returns:
            ([(seq_id, token ids of the first completion)] of the requests that it finished, number of tokens that it
            processed).
        """
        return self._report(
            lambda request: (request.request_id, request.sequences[0].completion_token_ids),
            lambda outs, batch: (outs, batch.num_tokens),
        )

    def step_outputs(self) -> list[tuple[int, Output]]:
        """Run one step; (seq_id, output as from `generate`) of each request that it finished."""
        return self._report(lambda request: (request.request_id, request.output()), lambda outs, batch: outs)

    def is_finished(self) -> bool:
        """True when no request is left to run or to be reported by `step`."""
        with self._open():
            return self.scheduler.is_finished() and not self._finished

    def abort(self, seq_id: int) -> bool:
        """Drop a request that `add_request` returned; False when there is no such unfinished request.

        Raises:
            TypeError, ValueError: `seq_id` is no id.
        """
        with self._open():
            request = self._requests.get(checked_int("seq_id", seq_id, 0))
            if request is None or request.request_id != seq_id:
                return False
            self._abandoned.append(request)
            self._abort_abandoned()
            return True

    def stats(self) -> dict[str, float]:
        """Where the engine stands and what it did.

        Returns:
            `running`, `waiting` (sequences), `kv_blocks`, `kv_blocks_used`, totals since the start: `steps`,
            `preemptions`, `computed_tokens`, `generated_tokens`, `prefix_queried_tokens`, `prefix_hit_tokens`,
            `seconds` (spent in steps), and `generated_tok_s`.
        """
        with self._open():
            blocks, scheduler = self.scheduler.block_manager, self.scheduler
            return {
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "kv_blocks": blocks.num_blocks,
                "kv_blocks_used": blocks.num_blocks - blocks.num_free_blocks,
                **asdict(scheduler.counters),
                "seconds": self._seconds,
                "generated_tok_s": scheduler.counters.generated_tokens / self._seconds if self._seconds else 0.0,
            }

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        with self._open():
            self.scheduler.block_manager.reset_prefix_cache()

    # ---- whole batches -------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[Output]:
        """Complete one or many prompts.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all prompts, or one for each.
            use_tqdm: show a progress bar.

        Returns:
            One dict a prompt, in order: `text` (None without a tokenizer), `token_ids`, `finish_reason` ("stop",
            "length", or "error" where the tokenizer failed at this completion), `stop_reason` (the stop string or
            stop token id that ended it, or what failed), `prompt_token_ids`,
            `num_cached_tokens` (prompt tokens found in the prefix cache), `metrics` (seconds: `queue_time`,
            `time_to_first_token`, `time_per_output_token`), `logprobs` where asked for (a dict a token: id to
            `logprob` and `token`), `prompt_logprobs` likewise (None for the first token), and for `n` > 1
            `completions`, a list of dicts of which the first is repeated above.

        Raises:
            TypeError, ValueError: naming the prompt and what is wrong with it; nothing has run then.
        """
        requests: list[Request] = []
        try:
            with ExitStack() as run:
                with collector_off():
                    self._enqueue_all(self._checked(prompts, sampling_params), requests)
                    run.enter_context(collector_frozen())  # first: switched on again, it would look at all of it
                self._run(requests, use_tqdm)
            return [request.output() for request in requests]
        except BaseException:
            self._abandoned.extend(requests)  # nothing of this call may be answered in the next
            raise

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """Complete prompts and yield what comes as it comes; leaving the loop early aborts the rest.

        Args, Raises: as for `generate`; a bad prompt is refused by this call, before the first iteration.
        """
        return self._stream(self._checked(prompts, sampling_params))

    def chat(
        self,
        messages: Messages | Seq[Messages],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Output]:
        """Complete one or many conversations, put into the model's own format by its chat template.

        Args:
            messages: a conversation (list of {"role", "content"}), or a list of conversations.
            sampling_params, use_tqdm: as for `generate`.
            chat_template_kwargs: passed to the template, e.g. `{"enable_thinking": False}`.

        Raises:
            TypeError, ValueError: no tokenizer or no chat template, or messages that the template refuses.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Seq):
            raise TypeError(f"messages must be a list of messages or of conversations, got {messages!r}")
        if not messages:
            raise ValueError("messages is empty")
        talks: Seq[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        kwargs = _template_kwargs(chat_template_kwargs)
        with self._open():
            prompts = [self._inputs.chat(talk, f"conversation {i}", kwargs) for i, talk in enumerate(talks)]
        return self.generate(prompts, sampling_params, use_tqdm)

    def score(self, prompts: Prompt | Seq[Prompt], use_tqdm: bool = True) -> list[Output]:
        """Log-likelihoods of texts or token ids under the model; nothing is generated from them.

        Args:
            prompts: as for `generate`.
            use_tqdm: show a progress bar.

        Returns:
            One dict a prompt, in order: `token_ids`, `logprobs` (one a token; None for the first, which nothing comes
            before), and `total`, their sum.

        Raises:
            TypeError, ValueError: as for `generate`; a prompt has to leave room for one token.
        """
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        scored = []
        for out in self.generate(prompts, params, use_tqdm):
            ids, entries = out["prompt_token_ids"], out["prompt_logprobs"]
            logprobs = [entry and entry[token]["logprob"] for token, entry in zip(ids, entries, strict=True)]
            scored.append({"token_ids": ids, "logprobs": logprobs, "total": sum(value or 0.0 for value in logprobs)})
        return scored

    def render_chat(self, messages: Messages, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of one conversation in the model's own format, ready to be answered."""
        with self._open():
            return self._inputs.chat(messages, "conversation", _template_kwargs(chat_template_kwargs))

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

    def __enter__(self) -> "LLMEngine":
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

    # ---- inside --------------------------------------------------------------------------------------------

    def _checked(self, prompts: Any, sampling_params: Any) -> list[tuple[list[int], SamplingParams]]:
        """Token ids and parameters of each prompt, all of them validated."""
        listed = prompt_list(prompts)
        listed_params = params_list(sampling_params, len(listed))
        with self._open():
            return [
                (self._inputs.token_ids(prompt, f"prompt {i}"), self._inputs.params(params, f"prompt {i}"))
                for i, (prompt, params) in enumerate(zip(listed, listed_params, strict=True))
            ]

    def _enqueue_all(self, checked: list[tuple[list[int], SamplingParams]], requests: list[Request]) -> None:
        """Queue all; `requests` grows with each, so that the caller knows them whenever this is interrupted."""
        with self._open():
            for ids, params in checked:
                self._enqueue(ids, params, requests, by_step=False)

    def _enqueue(self, ids: list[int], params: SamplingParams, requests: list[Request], by_step: bool) -> None:
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

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Step until all of `requests` are finished."""
        left, num_ended = list(requests), -1
        with Progress(len(requests), use_tqdm) as progress:
            while left:
                batch, num_left = self._step_for(left), len(left)
                if self._num_ended != num_ended:  # by whatever thread
                    num_ended = self._num_ended
                    left = [request for request in left if not request.finished]
                progress.update(batch, num_left - len(left))

    def _step_for(self, requests: list[Request]) -> Batch:
        """One step, unless another thread's steps finished all of `requests`."""
        with self._open():
            return Batch([], []) if all(request.finished for request in requests) else self._step()

    def _stream(self, checked: list[tuple[list[int], SamplingParams]]) -> Iterator[StreamOutput]:
        requests: list[Request] = []
        try:
            self._enqueue_all(checked, requests)  # not before somebody iterates
            while not all(request.finished for request in requests):
                self._step_for(requests)
                for index, request in enumerate(requests):
                    yield from request.increments(index)
        finally:
            self._abandoned.extend(requests)

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


def _template_kwargs(kwargs: Any) -> dict[str, Any]:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"chat_template_kwargs must be a dict, got {kwargs!r}")
    return dict(kwargs or {})
