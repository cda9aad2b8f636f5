"""`nanovllm generate`: keeps the engine full from a stream of lines, in memory that does not grow with their number."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm import SamplingParams
from nanovllm.cli.openai_batch import batch_failure, batch_success, is_batch_line, parse_batch_job
from nanovllm.cli.records import Fields, Line, dump, failure, parse_fields, parse_job, success
from nanovllm.cli.resume import Result
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import request_seed

RUNNING = 2  # times max_num_seqs requests in the engine: half of them wait, so that no place is ever empty
HELD = 16  # times max_num_seqs lines read and not yet written: how far short requests may overtake a long one
IDLE_SECONDS = 0.01  # between looks for a line when there is nothing to run


@dataclass(frozen=True)
class Defaults:
    """What holds for every line that does not say otherwise.

    Args:
        sampling: sampling parameters by name.
        template: arguments for the chat template.
        token_ids: write the generated ids too.
    """

    sampling: Fields = field(default_factory=dict)
    template: Fields = field(default_factory=dict)
    token_ids: bool = False


@dataclass
class Entry:
    """A line on its way through the engine. `fields` is None while, or because, it could not be parsed."""

    line: Line
    fields: Fields | None = None
    result: Result | None = None


class Feed:
    """Runs lines on an engine of its own and yields their results.

    Args:
        llm: the engine; nobody else may use it meanwhile.
        lines: read when the engine has room, never earlier; None means that there is none at the moment.
        defaults: see `Defaults`.
        ordered: yield in the order of the lines. Lines that are done early wait, at most `HELD` x max_num_seqs of them;
            then no further line is read until the oldest is done.
    """

    def __init__(self, llm: LLMEngine, lines: Iterable[Line | None], defaults: Defaults, ordered: bool):
        self._llm = llm
        self._lines = iter(lines)
        self._defaults = defaults
        self._base = SamplingParams(**sampling_fields(defaults.sampling))
        self._ordered = ordered
        max_num_seqs = llm.scheduler.max_num_seqs
        self._max_running, self._max_held = RUNNING * max_num_seqs, HELD * max_num_seqs
        self._running: dict[int, Entry] = {}  # by the engine's id
        self._waiting: deque[Entry] = deque()  # read and not yielded, oldest first; unordered: only those with a result
        self._exhausted = False

    def __iter__(self) -> Iterator[Result | None]:
        """Results; None after each step, for whatever the caller does from time to time."""
        while True:
            self._fill()
            yield from self._ready()
            if self._running:
                for seq_id, output in self._llm.step_outputs():
                    self._finish(self._running.pop(seq_id), output)
                yield None
            elif self._exhausted and not self._waiting:
                return

    def _fill(self) -> None:
        while len(self._running) < self._max_running and len(self._waiting) < self._max_held:
            try:
                line = next(self._lines)
            except StopIteration:
                self._exhausted = True
                return
            if line is None:
                if not self._running:
                    time.sleep(IDLE_SECONDS)
                return
            self._start(Entry(line))

    def _start(self, entry: Entry) -> None:
        if self._ordered:
            self._waiting.append(entry)
        try:
            self._running[self._request(entry)] = entry
        except (TypeError, ValueError) as error:
            self._fail(entry, str(error).removeprefix("request: ").removeprefix("conversation: "))

    def _request(self, entry: Entry) -> int:
        """Hand the line to the engine; TypeError or ValueError say what is wrong with it."""
        fields = entry.fields = parse_fields(entry.line)
        job = parse_batch_job(fields) if is_batch_line(fields) else parse_job(fields)
        params = replace(self._base, **sampling_fields(job.sampling)) if job.sampling else self._base
        if params.seed is None:  # by the line, not by the engine's count, which a resumed run begins anew
            params = replace(params, seed=request_seed(self._llm.config.seed, entry.line.index))
        prompt = job.prompt
        if job.source == "messages":
            prompt = self._llm.render_chat(prompt, {**self._defaults.template, **job.template})
        return self._llm.add_request(prompt, params)

    def _finish(self, entry: Entry, output: dict[str, Any]) -> None:
        assert entry.fields is not None
        if is_batch_line(entry.fields):
            record = batch_success(entry.fields, output, entry.line.index)
        else:
            record = success(entry.fields, output, self._defaults.token_ids)
        num_output = sum(len(c["token_ids"]) for c in output.get("completions", [output]))
        self._settle(entry, record, False, len(output["prompt_token_ids"]), num_output)

    def _fail(self, entry: Entry, message: str) -> None:
        line, fields = entry.line, entry.fields
        if fields is not None and is_batch_line(fields):
            record = batch_failure(fields, message, line.index)
        else:
            record = failure(fields, line.number, message)
        self._settle(entry, record, True, 0, 0)

    def _settle(self, entry: Entry, record: Fields, error: bool, prompt_tokens: int, output_tokens: int) -> None:
        line = entry.line
        entry.result = Result(line.index, line.size, dump(record), error, prompt_tokens, output_tokens)
        entry.fields = None  # the line out is all that is kept while it waits for its turn
        entry.line = replace(line, content=b"")
        if not self._ordered:
            self._waiting.append(entry)

    def _ready(self) -> Iterator[Result]:
        while self._waiting and (result := self._waiting[0].result) is not None:
            self._waiting.popleft()
            yield result


def sampling_fields(fields: Fields) -> Fields:
    """Arguments for `SamplingParams` out of JSON, whose objects have only texts for keys.

    Raises:
        TypeError, ValueError: a name that is none of a parameter, or a `logit_bias` that does not map ids.
    """
    unknown = sorted(set(fields) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        raise TypeError(f"unknown sampling parameter {', '.join(unknown)}")
    bias = fields.get("logit_bias")
    if not isinstance(bias, dict):
        return fields
    return {**fields, "logit_bias": {int(token_id): value for token_id, value in bias.items()}}
