"""bench.py: the published workload, the floor's arithmetic, and a run from end to end."""

import json

from nanovllm.bench import Request, decode_kv_bytes, main, mixed_workload, parse_args, uniform_workload
from tests.helpers import save_random_model, small_config


def test_default_workload_is_the_published_one():
    requests = mixed_workload(parse_args([]), 0)
    assert len(requests) == 256
    assert sum(len(r.prompt) for r in requests) == 142_827
    assert sum(r.output_len for r in requests) == 133_966
    again = mixed_workload(parse_args([]), 1)
    assert [len(r.prompt) for r in again] == [len(r.prompt) for r in requests]
    assert [r.output_len for r in again] == [r.output_len for r in requests]
    assert again[0].prompt != requests[0].prompt


def test_shared_workload_shares_its_prefix_and_repeats_are_fresh():
    args = parse_args(["--workload", "shared"])
    requests, fresh = uniform_workload(args, 0), uniform_workload(args, 1)
    assert {len(r.prompt) for r in requests} == {2176}
    assert len({tuple(r.prompt[:2048]) for r in requests}) == 1
    assert len({tuple(r.prompt[2048:]) for r in requests}) == 256
    assert fresh[0].prompt[:2048] != requests[0].prompt[:2048]


def test_groups_of_prefixes():
    requests = uniform_workload(parse_args(["--workload", "shared", "--groups", "8"]), 0)
    assert len({tuple(r.prompt[:2048]) for r in requests}) == 8
    assert requests[3].prompt[:2048] == requests[11].prompt[:2048]


def test_kv_floor_counts_what_each_decode_reads():
    """3 prompt tokens and 4 out: the first comes from prefill, the others attend to 4, 5 and 6 tokens."""
    assert decode_kv_bytes([Request([1, 2, 3], 4)], 10) == 150
    assert decode_kv_bytes([Request([1, 2, 3], 1)], 10) == 0


def test_bench_runs_and_ends_with_json(tmp_path, capsys):
    save_random_model(tmp_path, small_config("qwen3", vocab_size=10_001))
    options = ["--workload", "latency", "--num-requests", "2", "--input-len", "9", "--output-len", "5"]
    options += ["--model", str(tmp_path), "--device", "cpu"]
    main(["--temperature", "0", "--compare-transformers", *options])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["prompt_tokens"] == 18
    assert result["output_tokens"] == 10
    assert len(result["seconds"]) == len(result["transformers_seconds"]) == 3
    assert result["times_transformers"] > 0
    assert result["attention_backend"] == "torch"
    main(["--n", "3", "--repeats", "1", *options])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["output_tokens"] == 30
