"""From what users pass in to validated token ids and parameters; every refusal names the prompt."""

import struct
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Seq
from numbers import Integral
from operator import countOf
from typing import Any

from nanovllm.engine.dead_ends import dead_end
from nanovllm.engine.grammar import GrammarCompiler
from nanovllm.engine.request import bad_word_forms, bad_word_ids
from nanovllm.engine.step import int32_array
from nanovllm.sampling_params import SamplingParams

RESERVED_TEMPLATE_KWARGS = {"conversation", "tokenize", "add_generation_prompt"}

Prompt = str | Seq[int]


class InputProcessor:
    """Tokenises and validates.

    Args:
        tokenizer: of the model, or None.
        grammars: compiles what structured output asks for.
        vocab_size: ids are below it.
        eos_token_ids: ruled out until a completion has `min_tokens`.
        max_model_len: prompt and completion together.
        num_blocks, block_size: the KV pool that a prompt has to fit.
    """

    def __init__(
        self,
        tokenizer: Any,
        grammars: GrammarCompiler,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        num_blocks: int,
        block_size: int,
    ):
        self.tokenizer = tokenizer
        self.grammars = grammars
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.block_size = block_size

    @property
    def max_len(self) -> int:
        """Length at which any sequence ends. The last token needs no KV, so it may be one more than the pool holds."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def token_ids(self, prompt: Any, name: str) -> list[int]:
        """Validated ids of a text or a list of ids."""
        ids, smallest, largest = _integers(self._encode(prompt, name), name)
        if not ids:
            raise ValueError(f"{name}: the prompt is empty")
        if smallest < 0 or largest >= self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise ValueError(f"{name}: token id {wrong} is outside the vocabulary of {self.vocab_size}")
        if len(ids) + 1 > self.max_model_len:
            raise ValueError(
                f"{name}: {len(ids)} prompt tokens and one to generate exceed max_model_len {self.max_model_len}"
            )
        needed = -(-len(ids) // self.block_size)
        if needed > self.num_blocks:
            raise ValueError(
                f"{name}: {len(ids)} prompt tokens need {needed} KV blocks, the pool has {self.num_blocks} of "
                f"{self.block_size} tokens"
            )
        return ids

    def params(self, params: Any, name: str) -> SamplingParams:
        """Parameters checked against the vocabulary and the tokenizer."""
        if params is None:
            return SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"{name}: sampling_params must be SamplingParams, got {params!r}")
        for what, ids in params.token_ids_by_name().items():
            wrong = next((i for i in ids if i >= self.vocab_size), None)
            if wrong is not None:
                raise ValueError(f"{name}: {what} {wrong} is outside the vocabulary of {self.vocab_size}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"{name}: the model came without a tokenizer, so stop strings cannot be found")
        if params.bad_words:
            self._check_bad_words(params.bad_words, name)
        self.grammars.check(params, name)
        self._check_some_token_is_left(params, name)
        return params

    def _check_some_token_is_left(self, params: SamplingParams, name: str) -> None:
        ends = self.eos_token_ids.union(params.stop_token_ids) if params.min_tokens else frozenset()
        most_banned = len(ends) + 2 * len(params.bad_words)
        if params.allowed_token_ids is None and most_banned < self.vocab_size:
            return
        allowed = range(self.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        words = bad_word_ids(self.tokenizer, params)
        way = dead_end(words, allowed, ends, params.min_tokens, params.max_tokens)
        if way is not None:
            what = "the vocabulary" if params.allowed_token_ids is None else f"allowed_token_ids {list(allowed)[:8]}"
            causes = {"bad_words": params.bad_words, f"min_tokens {params.min_tokens}": ends}
            named = " and ".join(cause for cause, given in causes.items() if given)
            after = f" after {list(way)}" if way else ""
            raise ValueError(f"{name}: {named} leave no token of {what} to generate{after}")

    def _check_bad_words(self, words: Seq[str], name: str) -> None:
        if self.tokenizer is None:
            raise ValueError(f"{name}: the model came without a tokenizer, so bad_words have no tokens")
        for word in words:
            for text in bad_word_forms(word):
                ids = self._tokenize(text, name, add_special_tokens=False)
                wrong = next((i for i in ids if i >= self.vocab_size), None)
                if wrong is not None:
                    raise ValueError(f"{name}: token id {wrong} of bad word {text!r} is outside the vocabulary")

    def chat(self, conversation: Any, name: str, template_kwargs: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation in the model's own format."""
        if self.tokenizer is None:
            raise ValueError(f"{name}: the model came without a tokenizer, so it cannot chat")
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(f"{name}: the model's tokenizer has no chat template; use generate()")
        if not isinstance(conversation, Seq) or not all(isinstance(message, Mapping) for message in conversation):
            raise TypeError(f"{name}: a conversation is a list of {{'role', 'content'}} dicts, got {conversation!r}")
        reserved = sorted(RESERVED_TEMPLATE_KWARGS & set(template_kwargs))
        if reserved:
            raise ValueError(f"{name}: chat_template_kwargs may not set {', '.join(reserved)}")
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, **template_kwargs
            )
        except Exception as error:  # templates are programs of the model's author and raise what they like
            raise ValueError(f"{name}: the chat template refused it: {error}") from error
        # The template writes the beginning-of-sequence token itself where the model wants one.
        return self._tokenize(text, name, add_special_tokens=False)

    def _tokenize(self, text: str, name: str, **options: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, **options)
        except TypeError as error:  # what tokenizers raise for text that is no Unicode, such as half a surrogate pair
            raise ValueError(f"{name}: the tokenizer refused the text {text[:80]!r}: {error}") from error

    def _encode(self, prompt: Any, name: str) -> list[Any]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{name}: the model came without a tokenizer, so prompts must be token ids")
            return self._tokenize(prompt, name) if prompt else []
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()  # numpy arrays and torch tensors
        if isinstance(prompt, (bytes, bytearray, Mapping, Set)) or not isinstance(prompt, Iterable):
            raise TypeError(f"{name}: a prompt is a str or a list of token ids, got {prompt!r}")
        return list(prompt)


def _integers(ids: list[Any], name: str) -> tuple[list[int], int, int]:
    """(plain integers, the smallest, the largest); at C's speed, since prompts may add up to millions of tokens."""
    if not ids:
        return [], 0, 0
    if countOf(map(type, ids), int) < len(ids):
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, Integral):
                raise TypeError(f"{name}: token ids must be integers, got {i!r}")
        ids = [int(i) for i in ids]
    try:
        values = int32_array(ids)
    except struct.error:  # beyond 32 bits
        return ids, min(ids), max(ids)
    return ids, int(values.min()), int(values.max())


def prompt_list(prompts: Any) -> list[Any]:
    """One or many prompts as a list of prompts; a flat list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()  # numpy arrays and torch tensors
    if isinstance(prompts, (bytes, bytearray, Mapping, Set)) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a str, token ids or a list of them, got {prompts!r}")
    listed = list(prompts)
    if listed and isinstance(listed[0], Integral) and not isinstance(listed[0], bool):
        return [listed]
    return listed


def params_list(params: Any, count: int) -> list[Any]:
    """One for all or one for each, as a list of `count`."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, (str, bytes, Mapping)) or not isinstance(params, Iterable):
        raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {params!r}")
    listed = list(params)
    if len(listed) != count:
        raise ValueError(f"{len(listed)} sampling_params were given for {count} prompts")
    return listed
