"""Throughput of the engine on fixed workloads, beside what the memory of the machine would allow.

    python bench.py                                   # the published workload on Qwen3-0.6B's shape, dummy weights
    python bench.py --workload latency --model PATH
    python bench.py --model smollm2 --workload latency --output-len 64 --temperature 0 --compare-transformers

The last line of the output is one JSON object. Rates are of the median repeat; every repeat draws fresh tokens,
so that the prefix cache finds nothing from the one before.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from nanovllm import LLM, SamplingParams
from nanovllm.bench_floor import Request, decode_batches, decode_kv_bytes, decode_weight_bytes
from nanovllm.bench_sampling import SAMPLING_OPTIONS, VOCAB_SIZE, add_sampling_options, sampling_params, write_tokenizer
from nanovllm.engine.memory import kv_bytes_per_block
from nanovllm.utils.checkpoint import open_checkpoint

SHAPES = {  # hidden, intermediate, layers, query heads, KV heads, tied
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, False),
    "qwen3-30b-a3b": (2048, 6144, 48, 32, 4, False),
}
EXPERTS = {  # experts, of them chosen a token, intermediate of one
    "qwen3-30b-a3b": (128, 8, 768),
}
TOKEN_RANGE = 10_000  # prompt tokens are drawn from 0 .. TOKEN_RANGE, as published


def mixed_workload(args: argparse.Namespace, repeat: int) -> list[Request]:
    """`num_requests` of 100-1024 tokens in and out. Repeat 0 is the published one; others change the tokens only."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, TOKEN_RANGE) for _ in range(rng.randint(100, 1024))] for _ in range(args.num_requests)]
    lengths = [rng.randint(100, 1024) for _ in prompts]
    if repeat:
        fresh = random.Random(repeat)
        prompts = [[fresh.randint(0, TOKEN_RANGE) for _ in prompt] for prompt in prompts]
    return [Request(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


def uniform_workload(args: argparse.Namespace, repeat: int) -> list[Request]:
    """`num_requests` of `input_len` tokens and `output_len` out; the first `prefix_len` come from one of `groups`."""
    rng = random.Random(repeat)
    prefixes = [[rng.randint(0, TOKEN_RANGE) for _ in range(args.prefix_len)] for _ in range(args.groups)]
    own = args.input_len - args.prefix_len
    return [
        Request(prefixes[i % args.groups] + [rng.randint(0, TOKEN_RANGE) for _ in range(own)], args.output_len)
        for i in range(args.num_requests)
    ]


WORKLOADS: dict[str, tuple[Any, dict[str, int]]] = {
    "bench": (mixed_workload, {"num_requests": 256}),
    "latency": (uniform_workload, {"num_requests": 1, "input_len": 128, "output_len": 512, "prefix_len": 0}),
    "prefill": (uniform_workload, {"num_requests": 128, "input_len": 1024, "output_len": 1, "prefix_len": 0}),
    "shared": (uniform_workload, {"num_requests": 256, "input_len": 2176, "output_len": 64, "prefix_len": 2048}),
}


def write_shape(name: str, folder: Path) -> str:
    """A folder with nothing but the config of a Qwen3 model of that size."""
    hidden, intermediate, layers, q_heads, kv_heads, tied = SHAPES[name]
    sizes: dict[str, Any] = {}
    if name in EXPERTS:
        experts, chosen, inner = EXPERTS[name]
        sizes = {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": inner}
        sizes["norm_topk_prob"] = True
    config_class: Any = transformers.Qwen3MoeConfig if sizes else transformers.Qwen3Config
    config = config_class(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        head_dim=128,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=40960,
        dtype="bfloat16",
        **sizes,
    )
    config.architectures = [config_class.__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    return str(folder)


def copy_rate(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    size = 2**32 if device.type == "cuda" else 2**28
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size / min(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_engine(llm: LLM, requests: list[Request], params: list[SamplingParams]) -> float:
    """Seconds that `generate` takes."""
    start = time.perf_counter()
    outs = llm.generate([r.prompt for r in requests], params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    for out, asked in zip(outs, params, strict=True):
        lengths = [len(completion["token_ids"]) for completion in out.get("completions", [out])]
        if lengths != [asked.max_tokens] * asked.n:
            raise RuntimeError(
                f"asked for {asked.n} times {asked.max_tokens} tokens, got {lengths}: does a --stop occur?"
            )
    return elapsed


def run_transformers(model: Any, requests: list[Request]) -> float:
    """Seconds that `transformers` takes for the same requests, greedy, as one batch of equal lengths."""
    ids = torch.tensor([r.prompt for r in requests], device=model.device)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=requests[0].output_len,
        max_new_tokens=requests[0].output_len,
        do_sample=False,
        pad_token_id=0,
    )
    synchronize(model.device)
    assert out.shape[1] == len(requests[0].prompt) + requests[0].output_len
    return time.perf_counter() - start


def load_transformers(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model with the weights of the same checkpoint."""
    checkpoint = open_checkpoint(path)
    model = transformers.AutoModelForCausalLM.from_config(checkpoint.config(), dtype=dtype)
    loaded = model.load_state_dict({name: tensor.to(dtype) for name, tensor in checkpoint.weights()}, strict=False)
    if loaded.unexpected_keys or set(loaded.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"transformers wants other tensors than the checkpoint has: {loaded}")
    model.tie_weights()
    return model.to(device).eval()


def parse_args(argv: list[str] | None, prog: str = "bench.py") -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="bench")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="folder, .gguf file or Hub id; 'smollm2' is the embedded default model")
    which.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="dummy weights of this size")
    for name in ("num-requests", "input-len", "output-len", "prefix-len"):
        parser.add_argument(f"--{name}", type=int, help="instead of the workload's own")
    parser.add_argument("--groups", type=int, default=1, help="different prefixes (of prefix-len tokens)")
    parser.add_argument("--n", type=int, default=1, help="completions of each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compare-transformers", action="store_true", help="time transformers' generate as well")
    add_sampling_options(parser)
    engine = parser.add_argument_group("engine options (ablations)")
    engine.add_argument("--attention-backend", default="auto")
    engine.add_argument("--enforce-eager", action="store_true")
    engine.add_argument("--no-prefix-caching", action="store_true")
    engine.add_argument("--no-overlap", action="store_true", help="wait for a step's tokens before preparing the next")
    engine.add_argument("--no-shared-prefix-attention", action="store_true", help="read a shared prefix per sequence")
    engine.add_argument(
        "--paced-prompts", action=argparse.BooleanOptionalAction, help="start shorter sequences later (default: a rule)"
    )
    engine.add_argument("--device", default="auto")
    engine.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs (on a CPU: processes)")
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--kv-cache-dtype", default="auto")
    engine.add_argument("--quantization")
    for name in ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "kvcache-block-size"):
        engine.add_argument(f"--{name}", type=int)
    args = parser.parse_args(argv)
    for name, value in WORKLOADS[args.workload][1].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    unequal = args.workload == "bench" or args.n > 1
    if args.compare_transformers and (unequal or args.temperature != 0 or not args.model):
        parser.error("--compare-transformers needs --model, --temperature 0, n 1 and a workload of equal lengths")
    return args


def build_llm(args: argparse.Namespace, scratch: Path) -> tuple[LLM, str, float]:
    """(engine, path of the model, seconds to build it)."""
    options = {
        "device": args.device,
        "tensor_parallel_size": args.tensor_parallel_size,
        "dtype": args.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "quantization": args.quantization,
        "attention_backend": args.attention_backend,
        "enforce_eager": args.enforce_eager,
        "enable_prefix_caching": not args.no_prefix_caching,
        "overlap": False if args.no_overlap else None,
        "shared_prefix_attention": False if args.no_shared_prefix_attention else None,
        "paced_prompts": args.paced_prompts,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "kvcache_block_size": args.kvcache_block_size,
    }
    if args.model == "smollm2":
        from nanovllm.utils.default_model import default_model_path

        path = str(default_model_path())
    else:
        path = args.model or write_shape(args.shape, scratch)
        if not args.model and (args.with_text or args.stop):
            write_tokenizer(scratch)
    start = time.perf_counter()
    llm = LLM(path, load_format="auto" if args.model else "dummy", **options)
    return llm, path, time.perf_counter() - start


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"


def measure(
    args: argparse.Namespace, llm: LLM, path: str, batches: list[list[Request]]
) -> tuple[list[float], list[float]]:
    """Seconds of each repeat, of the engine and (if asked for) of transformers, taking turns: machines drift."""
    times, theirs = [], []
    model = None
    if args.compare_transformers:
        runner = llm.model_runner
        model = load_transformers(path, runner.model.dtype, runner.device)
        run_transformers(model, [Request(batches[0][0].prompt, 2)])
    for requests in batches:
        times.append(run_engine(llm, requests, sampling_params(args, requests)))
        if model is not None:
            theirs.append(run_transformers(model, requests))
    return times, theirs


def report(args: argparse.Namespace, llm: LLM, path: str, start_s: float) -> dict[str, Any]:
    device = llm.model_runner.device
    model = llm.model_runner.model
    spec = replace(model.spec, vocab_size=model.logit_columns)  # of rank 0: floors are those of one rank's memory
    dtype, kv_dtype = model.dtype, llm.model_runner.kv_cache.dtype
    make = WORKLOADS[args.workload][0]
    few = [Request(r.prompt[:64], 2) for r in make(args, 10**6)[:4]]
    run_engine(llm, few, sampling_params(args, few))  # warm up
    batches = [make(args, repeat) for repeat in range(args.repeats)]
    times, theirs = measure(args, llm, path, batches)
    elapsed = statistics.median(times)
    prompt_tokens = sum(len(r.prompt) for r in batches[0])
    output_tokens = args.n * sum(r.output_len for r in batches[0])
    rate = copy_rate(device)
    kv_bytes = args.n * decode_kv_bytes(batches[0], kv_bytes_per_block(spec, kv_dtype, 1))
    weight_bytes = decode_weight_bytes(
        decode_batches(batches[0], args.n), spec, dtype, 1 if args.quantization else None
    )
    result: dict[str, Any] = {
        "workload": args.workload,
        "model": args.model or args.shape,
        "tensor_parallel_size": args.tensor_parallel_size,
        "attention_backend": llm.model_runner.attention.name,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_cache_dtype": str(kv_dtype).removeprefix("torch."),
        "quantization": args.quantization,
        "requests": len(batches[0]),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "sampling": {name: getattr(args, name) for name in SAMPLING_OPTIONS if getattr(args, name)},
        "seconds": [round(t, 4) for t in times],
        "output_tok_s": round(output_tokens / elapsed, 1),
        "prompt_tok_s": round(prompt_tokens / elapsed, 1),
        "copy_rate_gb_s": round(rate / 1e9, 1),
        "decode_kv_gb": round(kv_bytes / 1e9, 2),
        "decode_weights_gb": round(weight_bytes / 1e9, 2),
        "share_of_kv_floor": round(kv_bytes / rate / elapsed, 4),
        "share_of_floor": round((kv_bytes + weight_bytes) / rate / elapsed, 4),
        "start_s": round(start_s, 2),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
        "hardware": hardware(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if theirs:
        result["transformers_seconds"] = [round(t, 4) for t in theirs]
        result["transformers_tok_s"] = round(output_tokens / statistics.median(theirs), 1)
        result["times_transformers"] = round(statistics.median(theirs) / elapsed, 2)
    return result


def main(argv: list[str] | None = None, prog: str = "bench.py") -> None:
    """Run what the command line asks for (`argv` without the program's name; default: this process's)."""
    args = parse_args(argv, prog)
    with tempfile.TemporaryDirectory() as scratch:
        llm, path, start_s = build_llm(args, Path(scratch))
        result = report(args, llm, path, start_s)
        llm.close()
    for name, value in result.items():
        print(f"{name:22} {value}")
    print(json.dumps(result))
