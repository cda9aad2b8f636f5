"""What float8 costs in accuracy: perplexity, and agreement with the greedy choices of float32. Run as a script.

The text is Python's own reference manual and the source of some of its modules, in windows. A variant's choices are
compared at every position of that text, and over completions that each variant goes on with by itself, where one
difference changes all that follows. Prints a table; the last line is JSON.
"""

import argparse
import contextlib
import json
import math
import os
import platform
from unittest import mock

import torch
import transformers

from nanovllm import LLM, SamplingParams

MODULES = ("argparse", "json.decoder", "textwrap", "ast", "heapq", "statistics", "difflib", "shutil")
VARIANTS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "KV fp8": {"kv_cache_dtype": "fp8"},
    "KV fp8, all scales 1": {"kv_cache_dtype": "fp8"},
    "weights fp8": {"quantization": "fp8"},
    "weights and KV fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def corpus() -> list[str]:
    """Prose and code, from what every Python has."""
    import importlib
    import inspect
    from pydoc_data.topics import topics

    prose = "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 4000)
    code = "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in MODULES)
    return [prose, code]


def windows(llm: LLM, count: int, length: int) -> list[list[int]]:
    """`count` runs of `length` tokens, half of them prose and half code, spread over the texts."""
    found = []
    for text, share in zip(corpus(), (count - count // 2, count // 2), strict=True):
        ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
        stride = len(ids) // share
        found += [ids[i * stride : i * stride + length] for i in range(share)]
    return found


def measure(llm: LLM, texts: list[list[int]], num_completed: int) -> tuple[float, list[int], list[list[int]]]:
    """(mean negative log-likelihood, most likely token at each position, greedy completions)."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    total, best = 0.0, []
    for out in llm.generate(texts, params, use_tqdm=False):
        for token, entry in zip(out["prompt_token_ids"][1:], out["prompt_logprobs"][1:], strict=True):
            total -= entry[token]["logprob"]
            best.append(max(entry, key=lambda t, e=entry: e[t]["logprob"]))
    prompts = [text[: len(text) // 4] for text in texts]
    params = SamplingParams(temperature=0, max_tokens=num_completed, ignore_eos=True, detokenize=False)
    completions = [out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)]
    return total / len(best), best, completions


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder, .gguf file or Hub id; 'smollm2': the default model")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window-len", type=int, default=512)
    parser.add_argument("--completed", type=int, default=48, help="tokens of each completion")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    path = args.model
    if path == "smollm2":
        from nanovllm.utils.default_model import default_model_path

        path = str(default_model_path())

    rows, texts, reference = {}, None, None
    for name in dict.fromkeys(["float32", *args.variants]):
        ones = mock.patch("nanovllm.engine.kv_scales.power_of_two_scales", lambda largest: torch.ones_like(largest))
        options = {"dtype": "float32", "device": args.device, "max_model_len": 2 * args.window_len, **VARIANTS[name]}
        with ones if name.endswith("scales 1") else contextlib.nullcontext(), LLM(path, **options) as llm:
            texts = texts or windows(llm, args.windows, args.window_len)
            loss, best, completions = measure(llm, texts, args.completed)
        reference = reference or (best, completions)
        same = sum(a == b for a, b in zip(best, reference[0], strict=True)) / len(best)
        shared = sum(map(common_prefix, completions, reference[1])) / sum(map(len, completions))
        rows[name] = {"perplexity": math.exp(loss), "same_choice": same, "common_prefix": shared}
        print(
            f"{name:24} perplexity {math.exp(loss):9.4f}  same choice {same:7.2%}  common prefix {shared:7.2%}",
            flush=True,
        )
    result = {
        "model": args.model,
        "positions": len(reference[0]),
        "rows": rows,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
