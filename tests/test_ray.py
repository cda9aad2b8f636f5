"""Replicas on a real Ray: the same lines out as from one engine, also when a replica is killed; and Ray Data."""

import json
import os
import signal

import numpy as np
import pytest

import nanovllm.ray
from nanovllm import LLM, SamplingParams
from nanovllm.cli.generate import Defaults, Feed
from nanovllm.cli.main import main
from nanovllm.cli.records import Line
from nanovllm.ray import BatchGenerator, RayFeed, plain

ray = pytest.importorskip("ray", reason="needs the extra 'ray'")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two CPUs, so two replicas; workers find the package and the tests where this process does."""
    env = {"env_vars": {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}}
    os.environ.setdefault("RAY_worker_niceness", "0")  # its own 15 lets whatever else runs here go first
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env=env)
    yield
    ray.shutdown()


def lines_of(count, **fields):
    return [
        Line(i, i + 1, 1, json.dumps({"id": i, "token_ids": [3 + i % 200, 7], **fields}).encode()) for i in range(count)
    ]


def test_a_killed_replica_costs_no_line_and_doubles_none(tiny, monkeypatch):
    """The lines out are those of one engine, draws included, in order."""
    chunk = 16
    monkeypatch.setattr(nanovllm.ray, "CHUNK", chunk)
    lines = lines_of(30 * chunk)
    defaults = Defaults({"max_tokens": 6, "temperature": 1.0})
    feed = RayFeed(tiny, {"device": "cpu", "max_num_seqs": 8}, defaults, lines, ordered=True, replicas=2)
    pids = ray.get([replica.pid.remote() for replica in feed.actors])
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    results = []
    for result in feed:
        if result is not None:
            results.append(result)
            if len(results) == 5 * chunk:
                os.kill(pids.pop(), signal.SIGKILL)
    assert len(pids) == 1
    feed.close()
    with LLM(tiny, device="cpu", max_num_seqs=8) as llm:
        expected = [result.data for result in Feed(llm, lines, defaults, ordered=True) if result is not None]
    assert [result.index for result in results] == list(range(len(lines)))
    assert [result.data for result in results] == expected


def test_the_command_writes_the_same_file_with_and_without_ray(tmp_path, tiny, capsys):
    records = [{"id": i, "token_ids": [3 + i % 200, 7]} for i in range(150)] + [{"id": "bad"}]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    common = ["--model", tiny, "--device", "cpu", "--max-tokens", "4", "--strict"]
    for name, options in (("one", []), ("two", ["--ray", "--replicas", "2"]), ("any", ["--ray", "--unordered"])):
        assert main(["generate", str(source), "-o", str(tmp_path / name), *common, *options]) == 1
        assert "151 lines" in capsys.readouterr().err
    one, two, unordered = ((tmp_path / name).read_bytes() for name in ("one", "two", "any"))
    assert two == one
    assert sorted(unordered.splitlines()) == sorted(one.splitlines())
    assert b"a line needs one of prompt" in one.splitlines()[-1]


def test_what_cannot_start_is_refused_in_words(tmp_path, tiny, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    assert main(["generate", str(source), "--model", str(tmp_path / "none"), "--device", "cpu", "--ray"]) == 2
    assert "a replica could not be started" in capsys.readouterr().err
    assert main(["generate", str(source), "--model", tiny, "--replicas", "2"]) == 2
    assert "--replicas must be at least 1 and needs --ray" in capsys.readouterr().err


def test_map_batches_over_two_replicas(tiny):
    rows = [{"key": i, "token_ids": [3 + i, 9]} for i in range(30)] + [{"key": 30, "token_ids": [999]}]
    dataset = ray.data.from_items(rows, override_num_blocks=4).map_batches(
        BatchGenerator,
        fn_constructor_kwargs={
            "model": tiny,
            "sampling_params": {"max_tokens": 5, "temperature": 0, "ignore_eos": True},
            "device": "cpu",
        },
        batch_size=4,
        concurrency=2,
    )
    outs = sorted(dataset.take_all(), key=lambda row: row["key"])
    assert [row["key"] for row in outs] == list(range(31))
    with LLM(tiny, device="cpu") as llm:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        expected = llm.generate([row["token_ids"] for row in rows[:30]], params, use_tqdm=False)
    assert [list(row["output_token_ids"]) for row in outs[:30]] == [out["token_ids"] for out in expected]
    assert [row["text"] for row in outs[:30]] == [out["text"] for out in expected]
    assert all(row["error"] is None and row["num_output_tokens"] == 5 for row in outs[:30])
    assert "outside the vocabulary" in outs[30]["error"]
    assert outs[30]["text"] is None


def test_a_batch_of_columns_draws_by_what_is_in_its_rows(tiny):
    """Whatever its place in the batch, and whether columns are NumPy's or Arrow's."""
    pa = pytest.importorskip("pyarrow")
    generator = BatchGenerator(tiny, {"max_tokens": 8, "ignore_eos": True}, device="cpu")
    rows = [{"prompt": "abc", "id": i, "sampling_params": {"n": 1 + i % 2}} for i in range(4)]
    table = generator(pa.Table.from_pylist(rows))
    back = {name: np.array([row[name] for row in rows[::-1]], dtype=object) for name in rows[0]}
    reverse = generator(back)
    assert list(table["text"]) == list(reverse["text"])[::-1]
    assert len(set(table["text"])) == 4, "rows that differ in nothing but an id draw differently"
    assert [value is None for value in table["completions"]] == [True, False, True, False]
    assert json.loads(table["completions"][1])[0]["text"] == table["text"][1]
    assert list(table["id"]) == [0, 1, 2, 3]


def test_plain_values():
    value = {"a": np.array([np.array([1, 2]), np.array([3])], dtype=object), "b": np.float32(0.5), "c": None}
    assert plain(value) == {"a": [[1, 2], [3]], "b": 0.5}
