"""Lines in and out: JSON lines (plain, .gz, standard input and output) and Parquet, read lazily.

A line in is an object with `prompt`, `messages` or `token_ids`, and whatever else the user wants to find again in the
line out. Lines of the OpenAI batch form are told by their `custom_id` and `body` (see openai_batch.py).
"""

import gzip
import json
import os
import queue
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

Fields = dict[str, Any]

STREAM = "-"  # standard input or output
SOURCES = ("prompt", "messages", "token_ids")
RESULTS = (  # what a line out adds; fields of a line in under these names, from an earlier run, are replaced
    *("text", "finish_reason", "stop_reason", "num_prompt_tokens", "num_output_tokens", "num_cached_tokens"),
    *("output_token_ids", "logprobs", "prompt_logprobs", "completions", "error"),
)
TEXT_COLUMNS = {
    "logprobs",
    "prompt_logprobs",
    "completions",
}  # in Parquet, as JSON: their keys are token ids, no columns
PARQUET_ROWS = 1024  # of one batch, in memory at a time
STREAM_LINES = 1024  # read ahead of the engine


@dataclass(frozen=True)
class Line:
    """One line of the input, not parsed yet.

    Args:
        index: counts from 0, without blank lines.
        number: counts from 1, as an editor does.
        size: share of the input's size (`input_size`) that it takes.
        content: bytes of a JSON object, or the row of a Parquet file.
    """

    index: int
    number: int
    size: int
    content: bytes | Fields


@dataclass(frozen=True)
class Job:
    """What a line asks for.

    Args:
        source: one of `SOURCES`.
        prompt: the value under that name.
        sampling: sampling parameters that the line sets itself.
        template: arguments for the chat template that the line sets itself.
    """

    source: str
    prompt: Any
    sampling: Fields = field(default_factory=dict)
    template: Fields = field(default_factory=dict)


def is_parquet(path: str) -> bool:
    return path.endswith((".parquet", ".pq"))


def input_size(path: str) -> int | None:
    """Bytes of a file as it lies on the disk, rows of a Parquet file, None for a stream."""
    if is_parquet(path):
        return parquet().ParquetFile(path).metadata.num_rows
    return os.path.getsize(path) if os.path.isfile(path) else None


def read_lines(path: str) -> Iterator[Line | None]:
    """The lines of a file, or of standard input for "-", one at a time; None while a stream has none to give."""
    if is_parquet(path):
        yield from _parquet_lines(path)
    elif path == STREAM:
        yield from _stream_lines(0)
    elif not os.path.isfile(path):
        yield from _stream_lines(path)
    else:
        with open(path, "rb") as file:
            content: Any = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
            yield from _json_lines(content, file)


def _json_lines(content: Iterable[bytes], file: IO[bytes] | None) -> Iterator[Line]:
    """`file` is what lies on the disk below `content`: where it stands tells how much of the input is read."""
    index = position = 0
    for number, raw in enumerate(content, 1):
        size = len(raw)
        if file is not None and content is not file:  # compressed: moves on in jumps of a buffer
            size = file.tell() - position
            position += size
        if raw.strip():
            yield Line(index, number, size, raw)
            index += 1


def _stream_lines(path: str | int) -> Iterator[Line | None]:
    """Read by a thread: who writes the stream may be waiting for the answers to its first lines."""
    lines: queue.Queue[Line | Exception | None] = queue.Queue(STREAM_LINES)

    def read() -> None:
        try:
            with open(path, "rb", closefd=path != 0) as stream:
                for line in _json_lines(stream, None):
                    lines.put(line)
            lines.put(None)
        except OSError as error:
            lines.put(error)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get_nowait()
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        if isinstance(line, Exception):
            raise line
        yield line


def _parquet_lines(path: str) -> Iterator[Line]:
    index = 0
    for batch in parquet().ParquetFile(path).iter_batches(batch_size=PARQUET_ROWS):
        for row in batch.to_pylist():
            yield Line(index, index + 1, 1, without_nulls(row))
            index += 1


def without_nulls(value: Any) -> Any:
    """Columns hold a null where a row has no such field; in rows, that is a field less, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [without_nulls(item) for item in value]
    return value


def parquet() -> Any:
    """pyarrow.parquet, which is an optional package."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("Parquet files need pyarrow: pip install 'nano-vllm[parquet]'") from error
    return pyarrow.parquet


def parse_fields(line: Line) -> Fields:
    """The line's object.

    Raises:
        ValueError: it is not one.
    """
    if isinstance(line.content, dict):
        return line.content
    try:
        fields = json.loads(line.content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # also text that is no UTF-8
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object but {type(fields).__name__}")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def parse_job(fields: Fields) -> Job:
    """What a line asks for, in the library's own form.

    Raises:
        TypeError, ValueError: naming what is missing or wrong.
    """
    sources = [name for name in SOURCES if fields.get(name) is not None]
    if len(sources) != 1:
        raise ValueError(f"a line needs one of prompt, messages and token_ids, got {' and '.join(sources) or 'none'}")
    own = {name: fields.get(name) or {} for name in ("sampling_params", "chat_template_kwargs")}
    for name, value in own.items():
        if not isinstance(value, dict):
            raise TypeError(f"{name} must be an object, got {value!r}")
    kind = str if sources[0] == "prompt" else list
    if not isinstance(fields[sources[0]], kind):
        what = "a text" if kind is str else "a list"
        raise TypeError(f"{sources[0]} must be {what}, got {fields[sources[0]]!r}")
    return Job(sources[0], fields[sources[0]], own["sampling_params"], own["chat_template_kwargs"])


def kept(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if name not in RESULTS}


def success(fields: Fields, output: Fields, token_ids: bool) -> Fields:
    """The line out of a finished request.

    Args:
        fields: of the line in.
        output: as from `LLM.generate`.
        token_ids: give the generated ids too. They are given anyway where there is no text.
    """
    completions = [_completion(c, token_ids) for c in output.get("completions", [output])]
    record = {**kept(fields), **completions[0]}
    record["num_prompt_tokens"] = len(output["prompt_token_ids"])
    record["num_cached_tokens"] = output["num_cached_tokens"]
    if "prompt_logprobs" in output:
        record["prompt_logprobs"] = output["prompt_logprobs"]
    if len(completions) > 1:
        record["completions"] = completions
    return record


def _completion(output: Fields, token_ids: bool) -> Fields:
    record = {name: output[name] for name in ("text", "finish_reason")}
    record["num_output_tokens"] = len(output["token_ids"])
    if output["finish_reason"] == "error":
        record["error"] = output["stop_reason"]
    elif output["stop_reason"] is not None:
        record["stop_reason"] = output["stop_reason"]
    if "logprobs" in output:
        record["logprobs"] = output["logprobs"]
    if token_ids or output["text"] is None:
        record["output_token_ids"] = output["token_ids"]
    return record


def failure(fields: Fields | None, number: int, message: str) -> Fields:
    """The line out of a line that could not run; without fields, its number tells which it was."""
    return {**({"line": number} if fields is None else kept(fields)), "error": message}


def dump(record: Fields) -> bytes:
    """One line of JSON."""
    text = json.dumps(record, ensure_ascii=False, default=str)  # Parquet knows types that JSON does not, such as dates
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can carry
        return json.dumps(record, default=str).encode() + b"\n"


def convert(lines: Path, target: Path) -> None:
    """Write the file of JSON lines `lines` again in the form that `target`'s name asks for."""
    if is_parquet(str(target).removesuffix(".tmp")):
        _write_parquet(lines, target)
    else:
        with open(lines, "rb") as source, gzip.open(target, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)


def _write_parquet(lines: Path, target: Path) -> None:
    """Twice over the lines: the columns and their types are not known before the last one."""
    import pyarrow as pa

    types: dict[str, Any] = {}
    for rows in _row_batches(lines):
        for name in dict.fromkeys(name for row in rows for name in row):
            if name in TEXT_COLUMNS:
                types[name] = pa.string()
                continue
            types[name] = _common_type(types.get(name, pa.null()), [row.get(name) for row in rows])
    schema = pa.schema(list(types.items()))
    as_text = {name for name, kind in types.items() if kind == pa.string()}
    with parquet().ParquetWriter(target, schema) as writer:
        for rows in _row_batches(lines):
            for row in rows:
                row.update((name, _text(row[name])) for name in as_text & row.keys())
            writer.write_table(pa.Table.from_pylist(rows, schema))


def _row_batches(lines: Path) -> Iterator[list[Fields]]:
    rows: list[Fields] = []
    with open(lines, "rb") as file:
        for line in file:
            rows.append(json.loads(line))
            if len(rows) == PARQUET_ROWS:
                yield rows
                rows = []
    yield rows


def _common_type(known: Any, values: list[Any]) -> Any:
    """A type for what was seen so far and `values`; text (of JSON) where there is none, as for an id of 7 or "7"."""
    import pyarrow as pa

    try:
        found = pa.schema([("x", pa.array(values).type)])
        merged = pa.unify_schemas([pa.schema([("x", known)]), found], promote_options="permissive").field("x").type
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.string()
    return pa.string() if merged == pa.struct([]) else merged  # Parquet has no empty struct


def _text(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
