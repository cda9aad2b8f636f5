"""Small random models, and ways to look inside an engine."""

import linecache
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import nanovllm
from nanovllm.engine.step import ROW_PARAMS, StepInput
from nanovllm.layers.parallel import Ranks

CONFIGS = {
    "gemma3": Gemma3TextConfig,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "olmo2": Olmo2Config,
    "olmo3": getattr(transformers, "Olmo3Config", None),  # transformers 4.57 and later
    "phi3": Phi3Config,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIBRARY = str(Path(nanovllm.__file__).parent)
VOCAB = 199  # prime, so that no padding to a round size hides


def small_config(family: str, **changes):
    """A config of two layers; `changes` overrides any field."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.15,
    }
    fields.update(changes)
    if family in ("qwen2", "olmo2", "olmo3", "phi3"):
        del fields["head_dim"]  # its config has none: hidden_size / num_attention_heads
    config = CONFIGS[family](**fields)
    config.architectures = [CONFIGS[family].__name__.replace("Config", "ForCausalLM").replace("Text", "")]
    return config


def save_random_model(folder: Path, config, seed: int = 0, **save_options):
    """Write a checkpoint of random float32 weights (norms and biases too); return the transformers model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + 1)
    model.save_pretrained(folder, **save_options)
    return model


@torch.inference_mode()
def reference_greedy(model, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' own greedy completion of one prompt."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def reference_choices(model, prompt: list[int], completion: list[int]) -> list[int]:
    """The token that transformers likes best after `prompt` and each beginning of `completion`, in one pass.

    If these are `completion`, it is transformers' own greedy completion, for models whose logits depend on nothing
    that comes later (which a rotation that changes with the length does).
    """
    logits = model(torch.tensor([prompt + completion[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def engine_logits(llm, prompt: list[int]) -> torch.Tensor:
    """Logits [len(prompt), vocab_size] of a prompt run in one step, in the engine's first blocks."""
    if llm._long_rope is not None:
        llm.model_runner.rows.rotary_offsets[0] = llm._long_rope.offset_for(len(prompt) + 1)
    return runner_logits(llm.model_runner, prompt)


@torch.inference_mode()
def runner_logits(runner, prompt: list[int]) -> torch.Tensor | None:
    """The same of a runner; with several ranks they come on rank 0."""
    num_blocks = -(-len(prompt) // runner.block_size)
    columns = np.arange(num_blocks, dtype=np.int32)
    inputs = StepInput(
        rows=np.zeros(1, np.int32),
        starts=np.zeros(1, np.int32),
        lengths=np.array([len(prompt)], np.int32),
        token_ids=np.array(prompt, np.int32),
        samples=np.ones(1, np.int32),
        table_changes=np.stack([np.zeros_like(columns), columns, columns]),
        row_params=np.zeros((ROW_PARAMS, 0), np.int32),
    )
    changes = torch.from_numpy(inputs.table_changes).to(runner.device)
    runner.rows.apply(changes, torch.zeros(ROW_PARAMS, 0, dtype=torch.int32, device=runner.device))
    input_ids, step, _ = runner._prepare(inputs)
    logits = runner.model.gather_logits(runner.model.compute_logits(runner.model(input_ids, step)))
    return None if logits is None else logits.float().cpu()


def in_ranks(size: int, function: Callable[[Ranks], Any]) -> list[Any]:
    """What `function` returns for each of `size` ranks, which are threads of this process with a gloo group."""
    store = torch.distributed.HashStore()

    def run(rank: int) -> Any:
        group = torch.distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        return function(Ranks(rank, size, group))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def random_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 258 ids without merges: <s>, </s>, then the bytes; it puts <s> before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    return tokenizer


class Interrupter:
    """Raises `error` at the `at`-th line of the library that a call executes; counts all when `at` is never reached.

    Left out are `with` lines that are passed again on the way out: there, Python itself takes no signal before the
    block has been left. With `again_after`, raises again so many lines later.
    """

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt, again_after: int | None = None):
        self._lines = {at} if again_after is None else {at, at + again_after}
        self._error = error
        self._inside: dict[int, set[int]] = {}
        self.count = 0
        self.where = self.source = ""  # the last line at which it raised

    def __call__(self, frame, event, arg):
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARY):
            return None
        if frame.f_lineno == frame.f_code.co_firstlineno:  # a generator goes on elsewhere
            self._inside[id(frame)] = set()
        inside = self._inside.setdefault(id(frame), set())  # lines of `with` blocks that it is in

        def line(frame, event, arg):
            if event == "line":
                source = linecache.getline(file, frame.f_lineno).strip()
                if source.startswith("with "):
                    inside.symmetric_difference_update({frame.f_lineno})
                    if frame.f_lineno not in inside:
                        return line
                self.count += 1
                if self.count in self._lines:
                    self.where, self.source = f"{Path(file).name}:{frame.f_lineno}", source
                    raise self._error
            return line

        return line

    def run(self, call):
        sys.settrace(self)
        try:
            return call()
        finally:
            sys.settrace(None)
