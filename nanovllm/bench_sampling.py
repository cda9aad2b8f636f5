"""The benchmark's sampling options, and a tokenizer for models that have none."""

import argparse
import random
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.bench_floor import Request

VOCAB_SIZE = 151_936  # of the shapes
PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
SAMPLING_OPTIONS = (*PARAMETERS, "stop", "seeds", "with_text")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling options (of every request)")
    sampling.add_argument("--temperature", type=float, default=0.6)
    for name in PARAMETERS[1:]:
        default = getattr(SamplingParams, name)
        sampling.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    sampling.add_argument("--seeds", action="store_true", help="a seed for each request")
    sampling.add_argument("--stop", action="append", default=[], help="a stop string that does not occur; repeatable")
    sampling.add_argument("--with-text", action="store_true", help="decode texts of --shape too; --stop implies it")


def sampling_params(args: argparse.Namespace, requests: list[Request]) -> list[SamplingParams]:
    options = {name: getattr(args, name) for name in PARAMETERS}
    return [
        SamplingParams(
            **options,
            stop=args.stop,
            seed=i if args.seeds else None,
            n=args.n,
            max_tokens=request.output_len,
            ignore_eos=True,
        )
        for i, request in enumerate(requests)
    ]


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of VOCAB_SIZE tokens, most of them random words of lower-case letters."""
    rng = random.Random(0)
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocab) < VOCAB_SIZE:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9)))
        vocab.setdefault(rng.choice(("", "\u0120")) + word, len(vocab))  # that symbol is the space
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
