"""The command itself: formats, options, exit statuses, help, chat."""

import gzip
import io
import json
import subprocess
import sys
from dataclasses import fields

import pytest

from nanovllm import LLM, SamplingParams, bench
from nanovllm.cli import main as main_module
from nanovllm.cli.chat import chat
from nanovllm.cli.main import main
from nanovllm.config import Config

RECORDS = [{"id": f"r{i}", "token_ids": [3 + i, 9]} for i in range(5)]


def write_jsonl(path, records=RECORDS):
    text = "".join(json.dumps(record) + "\n" for record in records)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
        file.write(text)
    return str(path)


def read_jsonl(path):
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        return [json.loads(line) for line in file]


def generate(tiny, *arguments):
    return main(["generate", *map(str, arguments), "--model", tiny, "--device", "cpu", "--max-tokens", "3"])


def test_gz_in_and_out_progress_and_a_second_start(tmp_path, tiny, capsys):
    source, target = write_jsonl(tmp_path / "in.jsonl.gz"), tmp_path / "out.jsonl.gz"
    assert generate(tiny, source, "-o", target) == 0
    assert [out["id"] for out in read_jsonl(target)] == [f"r{i}" for i in range(5)]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "5 lines in" in shown.err
    assert "tok/s" in shown.err
    before = target.read_bytes()
    assert generate(tiny, source, "-o", target) == 0  # nothing left to do
    assert "0 lines (and 5 earlier)" in capsys.readouterr().err
    assert target.read_bytes() == before
    write_jsonl(tmp_path / "in.jsonl.gz", RECORDS[:3])
    assert generate(tiny, source, "-o", target) == 2
    assert "begun with another input" in capsys.readouterr().err
    assert generate(tiny, source, "-o", target, "--restart") == 0
    assert len(read_jsonl(target)) == 3


def test_parquet_in_and_out(tmp_path, tiny):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"id": 1, "prompt": "a", "messages": None}, {"id": 2, "messages": messages}, {"id": 3}]
    pq.write_table(pa.Table.from_pylist(rows), source)
    assert generate(tiny, source, "-o", target, "--strict") == 1
    table = pq.read_table(target)
    assert table["id"].to_pylist() == [1, 2, 3]
    assert [text is None for text in table["text"].to_pylist()] == [False, False, True]
    assert [error is None for error in table["error"].to_pylist()] == [True, True, False]


def test_openai_batch_file(tmp_path, tiny):
    body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    target = tmp_path / "out.jsonl"
    assert generate(tiny, write_jsonl(tmp_path / "in.jsonl", [line]), "-o", target, "--ignore-eos") == 0
    (out,) = read_jsonl(target)
    assert out["custom_id"] == "a"
    assert out["response"]["body"]["usage"]["completion_tokens"] == 2


def test_standard_input_and_output(tiny):
    """Who writes the first line may wait for its answer before the second."""
    arguments = ["generate", "-", "--model", tiny, "--device", "cpu", "--max-tokens", "2", "--quiet"]
    code = "import sys; from nanovllm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for i in range(2):
        process.stdin.write(json.dumps({"id": i, "prompt": "a"}) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == i
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert process.stdout.read() == ""


def test_bad_lines_are_counted_and_strict_tells(tmp_path, tiny, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", [RECORDS[0], {"id": "bad"}])
    assert generate(tiny, source, "-o", tmp_path / "out.jsonl") == 0
    assert "1 lines with an error" in capsys.readouterr().err
    assert generate(tiny, source, "-o", tmp_path / "strict.jsonl", "--strict") == 1
    assert generate(tiny, source, "-o", tmp_path / "strict.jsonl", "--strict") == 1  # also when there is nothing to do
    assert read_jsonl(tmp_path / "out.jsonl")[1]["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "missing.jsonl does not exist"),
        (["in.jsonl", "-o", "in.jsonl"], "the same file"),
        (["in.jsonl", "--temperature", "-1"], "temperature"),
        (["in.jsonl", "--max-num-seqs", "0"], "max_num_seqs"),
        (["in.jsonl", "-o", "."], "is a folder"),
        (["in.jsonl", "-o", "no/such/folder/out.jsonl"], "no/such/folder"),
        (["in.jsonl", "--chat-template-kwargs", "3"], "JSON object"),
        (["in.jsonl", "--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_refusals_have_a_message_and_status_2(tmp_path, tiny, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl")
    assert main(["generate", "--model", tiny, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_every_field_is_an_option_with_help(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--help"])
    assert exit_.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for cls in (SamplingParams, Config):
        for field in fields(cls):
            assert f"--{field.name.replace('_', '-')}" in shown
    assert "divides the logits; 0 (anything below 1e-5)" in shown
    assert "(default: 0.9)" in shown


def test_options_arrive_with_their_types(tiny, monkeypatch):
    seen = {}

    def record(args):
        seen["defaults"] = main_module.checked_defaults(args).sampling
        seen["engine"] = main_module.given_options(args, Config, {"model"})
        return 0

    monkeypatch.setattr(main_module, "run_generate", record)
    options = '--temperature 0.5 --top-k 3 --max-tokens none --stop a --stop b --ignore-eos --logit-bias {"5":2}'
    options += " --stop-token-ids [7] --seed 9 --no-enable-prefix-caching --max-num-seqs 8 --dtype float32"
    assert main(["generate", "in.jsonl", *options.split()]) == 0
    assert seen["defaults"] == {
        **{"temperature": 0.5, "top_k": 3, "max_tokens": None, "stop": ["a", "b"], "ignore_eos": True},
        **{"logit_bias": {5: 2}, "stop_token_ids": [7]},
    }
    assert seen["engine"] == {"seed": 9, "enable_prefix_caching": False, "max_num_seqs": 8, "dtype": "float32"}


def test_each_kind_of_grammar_can_be_given(tmp_path, tiny):
    pytest.importorskip("llguidance")
    source, target = write_jsonl(tmp_path / "in.jsonl", RECORDS[:1]), tmp_path / "out.jsonl"
    given = {"--json-schema": '{"enum": [7]}', "--regex": "7", "--choice": '["7"]', "--grammar": 'start: "7"'}
    for option, value in given.items():
        assert generate(tiny, source, "-o", target, "--restart", option, value) == 0
        assert [out["text"] for out in read_jsonl(target)] == ["7"]


def test_chat_has_no_options_whose_effect_it_could_not_show(capsys):
    for option in ("--n=2", "--no-detokenize", "--logprobs=1", "--prompt-logprobs=1"):
        with pytest.raises(SystemExit):
            main(["chat", option])
        error = capsys.readouterr().err.partition("error: ")[2]
        assert error.startswith((f"unrecognized arguments: {option}", f"ambiguous option: {option}"))


def test_bench_is_bench(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "main", lambda argv, prog: seen.append((argv, prog)))
    assert main(["bench", "--workload", "latency"]) == 0
    assert seen == [(["--workload", "latency"], "nanovllm bench")]


class Questions:
    def __init__(self, *lines):
        self.lines = list(lines)

    def __call__(self, prompt):
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


def test_chat_streams_and_remembers(tiny, capsys, monkeypatch):
    with LLM(tiny, device="cpu") as llm:
        talks = []
        render = llm.render_chat
        monkeypatch.setattr(
            llm, "render_chat", lambda messages, kwargs: talks.append(list(messages)) or render(messages, kwargs)
        )
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        expected = llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False)[0]["text"]
        chat(llm, params, None, {}, Questions("hi", "", "more", "/reset", "x" * 500, "again", "/exit", "never"))
        assert llm.is_finished()
    shown = capsys.readouterr().out
    assert expected in shown
    assert "exceed max_model_len" in shown  # and the talk goes on without it
    assert [[message["content"] for message in talk] for talk in talks] == [
        ["hi"],
        ["hi", expected, "more"],
        ["x" * 500],
        ["again"],
    ]


def test_ctrl_c_stops_an_answer_not_the_talk(tiny, monkeypatch, capsys):
    class Interrupted(io.StringIO):
        def write(self, text):
            if "stop" in armed and text not in ("\n", "") and "Ctrl-C" not in text:
                armed.clear()
                raise KeyboardInterrupt
            return super().write(text)

    armed = {"stop"}
    out = Interrupted()
    monkeypatch.setattr(sys, "stdout", out)
    with LLM(tiny, device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        chat(llm, params, "be brief", {}, Questions("hi", "hi again"))
        assert llm.is_finished()
    assert not armed
    assert len(out.getvalue()) > 20


def test_chat_command(tiny, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", "--model", tiny, "--device", "cpu", "--max-tokens", "2"]) == 0
    assert "Ctrl-C stops an answer" in capsys.readouterr().out
