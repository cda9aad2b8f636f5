"""The `nanovllm` command."""

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from nanovllm import LLM, SamplingParams, bench
from nanovllm.cli.chat import chat
from nanovllm.cli.generate import Defaults, Feed, sampling_fields
from nanovllm.cli.options import add_options, given_options, json_value
from nanovllm.cli.progress import BatchProgress
from nanovllm.cli.records import STREAM, Line, input_size, is_parquet, parquet, read_lines
from nanovllm.cli.resume import Done, FileOutput, Result, StreamOutput, content_hash, open_output
from nanovllm.config import Config
from nanovllm.utils.default_model import default_model_path

ENGINE_ONLY = {f.name for f in fields(Config)}  # `--seed` is the engine's: one seed for every line would draw alike
UNSEEN = {"n", "detokenize", "logprobs", "prompt_logprobs"}  # what a talk in the terminal cannot show
CHAT_TOKENS = 1024

GENERATE = """\
Complete every line of a file.

A line is a JSON object with "prompt" (a text), "messages" (a conversation) or "token_ids", and optionally
"sampling_params", which go before the options given here, "chat_template_kwargs", and any other fields. The line
out has all of these and text, finish_reason, num_prompt_tokens, num_cached_tokens and num_output_tokens, or an
error. Lines in the OpenAI batch form ("custom_id" and a "/v1/chat/completions" body) come out in that form.

Killed or interrupted, the same command goes on where it was: until every line is done, the results are in
OUTPUT.partial, and OUTPUT.journal says which ones. Then OUTPUT appears.
"""
EXAMPLES = """\
examples:
  nanovllm generate prompts.jsonl -o results.jsonl --model Qwen/Qwen3-0.6B --max-tokens 256
  zcat prompts.jsonl.gz | nanovllm generate - --temperature 0 > results.jsonl
  nanovllm generate prompts.parquet -o results.parquet --unordered
  nanovllm generate prompts.jsonl -o results.jsonl --ray head-node:6379 --model Qwen/Qwen3-32B --tensor-parallel-size 2
"""


class Refusal(Exception):
    """Something that the user has to change; the message says what."""


def main(argv: list[str] | None = None) -> int:
    """Run the command (`argv` without the program's name; default: this process's); its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:
        bench.main(argv[1:], prog="nanovllm bench")  # has a parser of its own
        return 0
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING if args.quiet else logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return run_generate(args) if args.command == "generate" else run_chat(args)
    except Refusal as refusal:
        print(f"nanovllm {args.command}: error: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader is gone: let the flush at exit find no error
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nanovllm", description="LLM inference for offline batches.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    batch = commands.add_parser(
        "generate", help="complete every line of a file", description=GENERATE, epilog=EXAMPLES, formatter_class=raw
    )
    batch.add_argument("input", metavar="INPUT", help=".jsonl, .jsonl.gz or .parquet file; - is standard input")
    batch.add_argument("-o", "--output", default=STREAM, help="file of these kinds (default: standard output)")
    batch.add_argument("--unordered", action="store_true", help="write lines as they finish")
    batch.add_argument("--token-ids", action="store_true", help="write output_token_ids too")
    batch.add_argument("--strict", action="store_true", help="exit status 1 if any line has an error")
    batch.add_argument("--restart", action="store_true", help="drop what is in OUTPUT and start again")
    batch.add_argument("--quiet", action="store_true", help="no progress, no summary")
    batch.add_argument(
        "--ray", nargs="?", const="local", metavar="ADDRESS", help="run replicas on a Ray cluster (default: one here)"
    )
    batch.add_argument("--replicas", type=int, metavar="N", help="on the cluster (default: as many as it has GPUs for)")
    talk = commands.add_parser("chat", help="talk in the terminal", description="Talk in the terminal.")
    talk.add_argument("--system", metavar="TEXT", help="system message")
    talk.add_argument("--quiet", action="store_true", help="no messages of the engine")
    for command in (batch, talk):
        command.add_argument("--model", help="folder, .gguf file or Hub id (default: SmolLM2-135M-Instruct)")
        command.add_argument("--chat-template-kwargs", type=json_value, default={}, metavar="JSON")
        skip = ENGINE_ONLY | UNSEEN if command is talk else ENGINE_ONLY
        add_options(command, "sampling options", SamplingParams, skip)
        add_options(command, "engine options", Config, skip={"model"})
    commands.add_parser("bench", help="measure throughput on fixed workloads", add_help=False)
    return parser


def run_generate(args: argparse.Namespace) -> int:
    """`nanovllm generate`; its exit status."""
    defaults = checked_defaults(args)
    output = checked_output(args)
    with ExitStack() as stack:
        stack.callback(output.close)
        source = iter(()) if output.complete else open_results(args, defaults, output.done, stack)
        progress = BatchProgress(output.totals, input_size(args.input), unit(args.input), not args.quiet)
        stack.callback(progress.close)
        for result in source:
            if result is not None:
                output.write(result)
            output.commit(now=False)
            progress.update(output.totals)
        progress.update(output.totals, last=True)
        output.finish()
    if not args.quiet:
        print(progress.summary(output.totals), file=sys.stderr)
    return 1 if args.strict and output.totals.errors else 0


def open_results(args: argparse.Namespace, defaults: Defaults, done: Done, stack: ExitStack) -> Iterator[Result | None]:
    """Load the model; results of all lines that are not done. `stack` closes what this opens."""
    lines = (line for line in read_lines(args.input) if line is None or line.index not in done)
    if args.ray is not None:
        return open_replicas(args, defaults, lines, stack)
    llm = stack.enter_context(open_llm(args))
    return iter(Feed(llm, lines, defaults, not args.unordered))


def open_replicas(
    args: argparse.Namespace, defaults: Defaults, lines: Iterator[Line | None], stack: ExitStack
) -> Iterator[Result | None]:
    """The same from engines on a Ray cluster."""
    from nanovllm.ray import RayFeed, connect

    options = given_options(args, Config, skip={"model"})
    try:
        connect(args.ray)
        feed = RayFeed(args.model, options, defaults, lines, not args.unordered, args.replicas)
    except ValueError as error:
        raise Refusal(error) from error
    stack.callback(feed.close)
    return iter(feed)


def checked_defaults(args: argparse.Namespace) -> Defaults:
    sampling = given_options(args, SamplingParams, skip=ENGINE_ONLY)
    try:
        sampling = sampling_fields(sampling)
        SamplingParams(**sampling)
        Config.build("", given_options(args, Config, skip={"model"}))
    except (TypeError, ValueError) as error:
        raise Refusal(error) from error
    if not isinstance(args.chat_template_kwargs, dict):
        raise Refusal("chat-template-kwargs must be a JSON object")
    return Defaults(sampling, args.chat_template_kwargs, getattr(args, "token_ids", False))


def checked_output(args: argparse.Namespace) -> StreamOutput | FileOutput:
    """Where results go, once both ends are known to be there."""
    try:
        if args.replicas is not None and (args.replicas < 1 or args.ray is None):
            raise ValueError(f"--replicas must be at least 1 and needs --ray, got {args.replicas}")
        if args.input != STREAM and not os.path.exists(args.input):
            raise ValueError(f"{args.input} does not exist")
        if args.input != STREAM and os.path.realpath(args.input) == os.path.realpath(args.output):
            raise ValueError("input and output are the same file")
        if is_parquet(args.output):
            parquet()
        return open_output(args.output, sys.stdout.buffer, lambda: fingerprint(args), args.restart)
    except (OSError, ValueError) as error:
        raise Refusal(error) from error


def fingerprint(args: argparse.Namespace) -> dict[str, Any]:
    """What the results depend on. How they are reported may change on the way."""
    other = {"input", "output", "command", "strict", "restart", "quiet", "ray", "replicas"}
    options = {name.replace("_", "-"): value for name, value in vars(args).items() if name not in other}
    return {"input": content_hash(args.input), **options}


def unit(path: str) -> str:
    return "row" if is_parquet(path) else "B"


def model(args: argparse.Namespace) -> str:
    return args.model or str(default_model_path())


def open_llm(args: argparse.Namespace) -> LLM:
    try:
        return LLM(model(args), **given_options(args, Config, skip={"model"}))
    except (OSError, TypeError, ValueError) as error:
        raise Refusal(error) from error


def run_chat(args: argparse.Namespace) -> int:
    """`nanovllm chat`; its exit status."""
    defaults = checked_defaults(args)
    with open_llm(args) as llm:
        if getattr(llm.tokenizer, "chat_template", None) is None:
            raise Refusal("the model has no chat template")
        chat(llm, SamplingParams(**{"max_tokens": CHAT_TOKENS, **defaults.sampling}), args.system, defaults.template)
    return 0
