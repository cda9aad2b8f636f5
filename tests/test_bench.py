"""bench.py: the published workload, the floor's arithmetic, and a run from end to end."""

import json

import pytest
import torch
import transformers

from nanovllm import SamplingParams
from nanovllm.bench import main, mixed_workload, parse_args, uniform_workload, write_shape
from nanovllm.bench_floor import Request, decode_batches, decode_kv_bytes, decode_weight_bytes, experts_touched
from nanovllm.bench_sampling import VOCAB_SIZE, sampling_params, write_tokenizer
from nanovllm.models.registry import model_spec
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


def test_weight_floor_counts_each_step():
    assert decode_batches([Request([1], 4), Request([1, 2], 2), Request([3], 1)], 1) == [2, 1, 1]
    assert decode_batches([Request([1], 3)], 5) == [5, 5]


@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("qwen3_moe", {"num_experts_per_tok": 8})])
def test_weight_floor_is_the_size_of_the_matrices(family, changes):
    """All of them where each token goes through all experts."""
    config = small_config(family, num_experts=8, moe_intermediate_size=24, mlp_only_layers=[1], **changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) - model.model.embed_tokens.weight.numel()
    assert decode_weight_bytes([3, 1], model_spec(config), torch.bfloat16) == 2 * 2 * matrices
    if family == "qwen3":  # linear layers in float8, the LM head not
        head = model.lm_head.weight.numel()
        assert decode_weight_bytes([3, 1], model_spec(config), torch.bfloat16, 1) == 2 * (matrices + head)


def test_experts_touched():
    assert experts_touched(1, 128, 8) == pytest.approx(8)
    counts = [len({i for _ in range(16) for i in torch.randperm(32)[:4].tolist()}) for _ in range(500)]
    assert experts_touched(16, 32, 4) == pytest.approx(sum(counts) / 500, abs=0.5)


def test_shape_with_experts(tmp_path):
    path = write_shape("qwen3-30b-a3b", tmp_path)
    spec = model_spec(transformers.AutoConfig.from_pretrained(path))
    assert (spec.head_dim, spec.num_q_heads, spec.num_kv_heads) == (128, 32, 4)
    assert (spec.moe.num_experts, spec.moe.top_k, spec.moe.intermediate_size) == (128, 8, 768)
    assert len(spec.moe.layers) == spec.num_layers == 48
    assert 30e9 < decode_weight_bytes([10**6], spec, torch.int8) + spec.vocab_size * spec.hidden_size < 31e9


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
    main(["--repeats", "1", "--tensor-parallel-size", "2", *options])
    several = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (several["tensor_parallel_size"], several["output_tokens"]) == (2, 10)
    assert several["decode_kv_gb"] <= result["decode_kv_gb"]


def test_sampling_options_reach_the_requests():
    line = "--top-p 0.9 --top-k 50 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.5 --frequency-penalty -0.5"
    args = parse_args([*line.split(), "--seeds", "--stop", "###", "--stop", "END", "--n", "2"])
    first, second = sampling_params(args, [Request([1], 5), Request([2], 7)])
    assert first == SamplingParams(
        temperature=0.6,
        top_p=0.9,
        top_k=50,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=0,
        stop=["###", "END"],
        n=2,
        max_tokens=5,
        ignore_eos=True,
    )
    assert (second.seed, second.max_tokens) == (1, 7)
    (plain,) = sampling_params(parse_args([]), [Request([1], 5)])
    assert plain == SamplingParams(temperature=0.6, max_tokens=5, ignore_eos=True)


def test_tokenizer_of_a_shape_has_a_text_for_each_id(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = list(range(0, VOCAB_SIZE, 997))
    texts = [tokenizer.decode([i]) for i in ids]
    assert len(tokenizer) == VOCAB_SIZE
    assert len({*texts}) == len(ids)
    assert tokenizer.decode(ids) == "".join(texts)
