"""Complete a few prompts: with the embedded default model, or with the one you name.

python example.py
python example.py --model Qwen/Qwen3-0.6B --prompt "What is a block table?" --prompt "Name three rivers."
"""

import argparse
import logging
import time

from nanovllm import LLM, SamplingParams
from nanovllm.utils.default_model import default_model_path

PROMPTS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, .gguf file or Hub id (default: SmolLM2-135M-Instruct, fetched once)")
    parser.add_argument("--prompt", action="append", help="a prompt; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token every time")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    prompts = args.prompt or PROMPTS
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with LLM(args.model or default_model_path()) as llm:
        start = time.perf_counter()
        if llm.tokenizer.chat_template:
            outs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            outs = llm.generate(prompts, params)
        elapsed = time.perf_counter() - start
    for prompt, out in zip(prompts, outs, strict=True):
        print(f"\nPrompt:     {prompt}\nCompletion: {out['text'].strip()}")
    num_tokens = sum(len(out["token_ids"]) for out in outs)
    print(
        f"\n{num_tokens} tokens in {elapsed:.2f} s: {num_tokens / elapsed:.0f} tok/s, {len(prompts)} prompts together"
    )


if __name__ == "__main__":
    main()
