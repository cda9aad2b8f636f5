"""Reading and writing of lines, without an engine."""

import gzip
import json

import pytest

from nanovllm.cli.records import Line, convert, dump, input_size, parse_fields, parse_job, read_lines, success

OUTPUT = {
    "text": "hi",
    "token_ids": [4, 5],
    "finish_reason": "stop",
    "stop_reason": None,
    "prompt_token_ids": [1, 2, 3],
    "num_cached_tokens": 1,
}


def line(content):
    return Line(0, 1, 0, content)


@pytest.mark.parametrize("packed", [False, True])
def test_lines_are_read_lazily_and_their_sizes_add_up(tmp_path, packed):
    path = tmp_path / ("in.jsonl.gz" if packed else "in.jsonl")
    with (gzip.open if packed else open)(path, "wb") as file:
        file.write(b'{"a": 1}\n\n{"a": 2}\n{"a": 3}')  # a blank line, and no newline at the end
    lines = list(read_lines(str(path)))
    assert [(each.index, each.number) for each in lines] == [(0, 1), (1, 3), (2, 4)]
    assert [parse_fields(each) for each in lines] == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert 0 < sum(each.size for each in lines) <= input_size(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{bad", "not valid JSON"),
        (b"\xff\xfe{", "not valid JSON"),
        (b'{"prompt": NaN}', "NaN"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "not a JSON object but list"),
        (b"{}", "none"),
        (b'{"prompt": "a", "token_ids": [1]}', "prompt and token_ids"),
        (b'{"prompt": 3}', "prompt must be a text, got 3"),
        (b'{"token_ids": "abc"}', "token_ids must be a list"),
        (b'{"prompt": "a", "sampling_params": 3}', "sampling_params must be an object"),
    ],
)
def test_what_is_wrong_with_a_line_is_named(content, message):
    with pytest.raises((TypeError, ValueError), match=message):
        parse_job(parse_fields(line(content)))


def test_a_line_out_keeps_the_fields_and_replaces_an_earlier_result():
    record = success({"id": 7, "prompt": "x", "error": "old", "text": "old"}, OUTPUT, token_ids=False)
    assert record == {
        **{"id": 7, "prompt": "x", "text": "hi", "finish_reason": "stop"},
        **{"num_prompt_tokens": 3, "num_cached_tokens": 1, "num_output_tokens": 2},
    }
    assert success({}, OUTPUT, token_ids=True)["output_token_ids"] == [4, 5]
    assert success({}, {**OUTPUT, "text": None}, token_ids=False)["output_token_ids"] == [4, 5]


def test_half_a_surrogate_pair_survives():
    assert json.loads(dump({"a": "\ud800é"})) == {"a": "\ud800é"}


def test_parquet_there_and_back(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": 1, "x": [1]}, {"id": "b", "y": {"k": 1.5}}, {"id": None, "x": [], "logprobs": [{"5": 1}]}]
    (tmp_path / "lines").write_bytes(b"".join(map(dump, rows)))
    target = tmp_path / "out.parquet"
    convert(tmp_path / "lines", target)
    table = pq.read_table(target)
    assert table["id"].to_pylist() == ["1", "b", None]  # ids of two types become text
    assert table["y"].to_pylist() == [None, {"k": 1.5}, None]
    assert table["logprobs"].to_pylist() == [None, None, '[{"5": 1}]']
    assert input_size(str(target)) == 3
    fields = [parse_fields(each) for each in read_lines(str(target))]
    assert fields[0] == {"id": "1", "x": [1]}  # nulls are fields that the row does not have
