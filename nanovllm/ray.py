"""Batches on a Ray cluster: replicas of the engine behind `nanovllm generate --ray`, and a callable for Ray Data.

A replica is an actor that holds an `LLM`. Lines go to it in chunks, several at a time, so that its engine goes on from
one chunk to the next without running empty. When a replica dies, Ray starts it again and repeats the chunks that it had
not answered: a chunk's results come back whole or not at all, so that nothing is lost and nothing comes twice.
"""

import json
import os
import queue
import threading
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from nanovllm.cli.generate import Defaults, Feed
from nanovllm.cli.records import RESULTS, Fields, Line
from nanovllm.cli.resume import Result
from nanovllm.llm import LLM
from nanovllm.utils.default_model import default_model_path

if TYPE_CHECKING:
    import pyarrow

CHUNK = 64  # lines that travel together
CHUNKS_AT_ONCE = 16  # at a replica: what its engine has to choose from
MAX_AHEAD = 64  # times the number of replicas: chunks done before the oldest one that is not
MAX_TRIES = 4  # of a chunk whose replicas die


class Replica:
    """An engine that answers chunks of lines, from several threads at once.

    Args:
        model: as for `LLM`; None is the embedded default model.
        options: of `LLM`.
        defaults: what holds for every line that does not say otherwise.
    """

    def __init__(self, model: str | None, options: dict[str, Any], defaults: Defaults):
        self._llm = LLM(model or str(default_model_path()), **options)
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._answers: dict[int, Future[Result]] = {}  # by the line's index
        self._defaults = defaults
        threading.Thread(target=self._serve, daemon=True).start()

    def pid(self) -> int:
        """Of the replica's process; answers once the model is loaded."""
        return os.getpid()

    def run(self, lines: list[Line]) -> list[Result]:
        """Results of a chunk, in its order."""
        answers: list[Future[Result]] = [Future() for _ in lines]
        for line, answer in zip(lines, answers, strict=True):
            self._answers[line.index] = answer
            self._lines.put(line)
        return [answer.result() for answer in answers]

    def _serve(self) -> None:
        """One feed for all chunks."""
        try:
            for result in Feed(self._llm, self._incoming(), self._defaults, ordered=False):
                if result is not None:
                    self._answers.pop(result.index).set_result(result)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # an engine that broke is replaced as one that died is

    def _incoming(self) -> Iterator[Line | None]:
        while True:
            try:
                yield self._lines.get_nowait()
            except queue.Empty:
                yield None


class RayFeed:
    """Runs lines on replicas and yields their results, as `Feed` does on one engine.

    Args:
        model, options, defaults: of each replica.
        lines: read when a replica has room.
        ordered: yield in the order of the lines.
        replicas: their number; None is what the GPUs of the cluster allow, without any one a node.
    """

    def __init__(
        self,
        model: str | None,
        options: dict[str, Any],
        defaults: Defaults,
        lines: Iterable[Line | None],
        ordered: bool,
        replicas: int | None = None,
    ):
        ray = import_ray()
        gpus = int(options.get("tensor_parallel_size", 1)) if uses_gpus(options) else 0
        actor = ray.remote(Replica).options(
            num_cpus=1,
            num_gpus=gpus,
            max_concurrency=CHUNKS_AT_ONCE + 1,
            max_restarts=-1,
            max_task_retries=MAX_TRIES - 1,
        )
        count = replicas or default_replicas(gpus)
        self.actors = [actor.remote(model, options, defaults) for _ in range(count)]
        self._ray = ray
        self._lines = (line for line in lines if line is not None)
        self._ordered = ordered
        try:
            ray.get([replica.pid.remote() for replica in self.actors])
        except ray.exceptions.RayError as error:
            self.close()
            raise ValueError(f"a replica could not be started: {root_cause(error)}") from error

    def __iter__(self) -> Iterator[Result | None]:
        """Results; None between chunks."""
        running: dict[Any, tuple[int, int]] = {}  # reference to a chunk's results: (number of the chunk, replica)
        done: dict[int, list[Result]] = {}
        load = [0] * len(self.actors)
        submitted = oldest = 0
        exhausted = False
        while True:
            while not exhausted and min(load) < CHUNKS_AT_ONCE and submitted - oldest < MAX_AHEAD * len(load):
                chunk = list(islice(self._lines, CHUNK))
                exhausted = not chunk
                if chunk:
                    replica = load.index(min(load))
                    running[self.actors[replica].run.remote(chunk)] = submitted, replica
                    load[replica] += 1
                    submitted += 1
            if not running:
                return
            for reference in self._ray.wait(list(running), timeout=1.0)[0]:
                number, replica = running.pop(reference)
                load[replica] -= 1
                try:
                    done[number] = self._ray.get(reference)
                except self._ray.exceptions.RayError as error:
                    message = f"replicas died {MAX_TRIES} times on the same {CHUNK} lines: {root_cause(error)}"
                    raise RuntimeError(message) from error
            if not self._ordered:
                for number in list(done):
                    yield from done.pop(number)
                oldest = min((number for number, _ in running.values()), default=submitted)
            while oldest in done:
                yield from done.pop(oldest)
                oldest += 1
            yield None

    def close(self) -> None:
        """End the replicas."""
        for replica in self.actors:
            self._ray.kill(replica)


class BatchGenerator:
    """For `ray.data.Dataset.map_batches`: rows with `prompt`, `messages` or `token_ids` in, the same and results out.

        dataset.map_batches(
            BatchGenerator, fn_constructor_kwargs={"model": ..., "sampling_params": {"max_tokens": 64}},
            batch_size=1024, concurrency=8, num_gpus=1,
        )

    A row may have `sampling_params` of its own; other columns are kept. Each result column is there in every batch:
    text, finish_reason, stop_reason, num_prompt_tokens, num_output_tokens, num_cached_tokens, output_token_ids, error
    (of a row that could not run; the others go on), and, as JSON, completions, logprobs and prompt_logprobs. A row's
    seed comes from what is in the row, so that it draws the same on whatever replica, and again when Ray repeats the
    batch.

    Args:
        model: as for `LLM`; None is the embedded default model.
        sampling_params: by name; what holds for rows that do not say otherwise.
        chat_template_kwargs: likewise.
        options: of `LLM`.
    """

    COLUMNS = tuple(name for name in RESULTS)
    AS_JSON = ("completions", "logprobs", "prompt_logprobs")

    def __init__(
        self,
        model: str | None = None,
        sampling_params: Fields | None = None,
        chat_template_kwargs: Fields | None = None,
        **options: Any,
    ):
        self._llm = LLM(model or str(default_model_path()), **options)
        self._defaults = Defaults(sampling_params or {}, chat_template_kwargs or {}, token_ids=True)

    def __call__(self, batch: "dict[str, np.ndarray] | pyarrow.Table") -> dict[str, np.ndarray]:
        """The batch with the result columns."""
        columns = batch if isinstance(batch, dict) else {name: batch[name].to_pylist() for name in batch.column_names}
        rows = rows_of(columns)
        results = [json.loads(result.data) for result in self._feed(rows) if result is not None]
        out = {name: np.asarray(values) for name, values in columns.items() if name not in self.COLUMNS}
        for name in self.COLUMNS:
            values = [result.get(name) for result in results]
            if name in self.AS_JSON:
                values = [value if value is None else json.dumps(value) for value in values]
            out[name] = object_array(values)
        return out

    def _feed(self, rows: list[Fields]) -> Feed:
        lines = [Line(row_seed(row), i + 1, 1, row) for i, row in enumerate(rows)]
        return Feed(self._llm, lines, self._defaults, ordered=True)


def import_ray() -> Any:
    """The package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError("this needs Ray: pip install 'nano-vllm[ray]'") from error
    return ray


def connect(address: str) -> None:
    """Join the cluster at `address` ("local" starts one on this machine), unless this process is in one.

    Raises:
        ValueError: nobody is there.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        raise ValueError(f"no Ray cluster at {address}: {error}") from error


def uses_gpus(options: dict[str, Any]) -> bool:
    """Whether replicas run on GPUs: as the options say, or else where the cluster has any."""
    device = options.get("device", "auto")
    return bool(import_ray().cluster_resources().get("GPU")) if device == "auto" else device.startswith("cuda")


def default_replicas(gpus: int) -> int:
    """As many as there are GPUs for, at `gpus` each; without GPUs, one a node."""
    ray = import_ray()
    if not gpus:
        return sum(node["Alive"] for node in ray.nodes())
    count = int(ray.cluster_resources().get("GPU", 0)) // gpus
    if not count:
        raise ValueError(f"a replica needs {gpus} GPUs, the cluster has {ray.cluster_resources().get('GPU', 0):.0f}")
    return count


def root_cause(error: BaseException) -> str:
    """The last line of what a replica raised."""
    cause = getattr(error, "cause", None) or error
    return str(cause).strip().splitlines()[-1]


def rows_of(columns: "dict[str, Any]") -> list[Fields]:
    """Plain rows of a batch in columns; a null is a field less."""
    values = {name: [plain(value) for value in column] for name, column in columns.items()}
    count = len(next(iter(values.values()), []))
    return [{name: column[i] for name, column in values.items() if column[i] is not None} for i in range(count)]


def plain(value: Any) -> Any:
    """Python's own types in place of NumPy's, at any depth."""
    if isinstance(value, (np.ndarray, list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if item is not None}
    return value.item() if isinstance(value, np.generic) else value


def row_seed(row: Fields) -> int:
    text = json.dumps(row, sort_keys=True, default=str)
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) >> 1


def object_array(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
