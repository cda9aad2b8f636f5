"""A tokenizer from the metadata of a GGUF file.

The file names the pre-tokenizer and lists tokens, kinds, merges or scores; how text is normalised, split and decoded
is not in it and follows from the two names `tokenizer.ggml.model` and `tokenizer.ggml.pre`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

PREFIX = "tokenizer.ggml."
SPACE = "\u2581"  # what SentencePiece writes for a space
# Special tokens by their name in the metadata (the misspelling is the format's) and in transformers.
SPECIAL_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "mask": "mask"}

# Words of GPT-4 as Llama 3 and Qwen use them: contractions, letters with one leading sign, digits, signs, blanks.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class ByteLevelStyle:
    """What a pre-tokenizer's name stands for.

    Args:
        words: expression that splits text into words; None is GPT-2's.
        single_digits: split digits off one by one first.
        nfc: normalise text to composed characters.
        whole_words: a word that is a token is taken as it is, without merges (as in tiktoken).
        add_bos: whether a sequence starts with `bos` when the file does not say.
    """

    words: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


LLAMA3 = ByteLevelStyle(words=WORDS.format(digits=r"\p{N}{1,3}"), whole_words=True, add_bos=True)
STYLES = {
    "default": ByteLevelStyle(),
    "gpt-2": ByteLevelStyle(),
    "smollm": ByteLevelStyle(single_digits=True),
    "qwen2": ByteLevelStyle(words=WORDS.format(digits=r"\p{N}"), nfc=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens with their kinds, by id."""

    tokens: list[str]
    kinds: list[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> "Vocabulary":
        """The vocabulary in a file's metadata; ValueError when there is none or the lengths differ."""
        tokens = _list(metadata, "tokens")
        kinds = metadata.get(f"{PREFIX}token_type", [TokenKind.NORMAL] * len(tokens))
        if len(kinds) != len(tokens):
            raise ValueError(f"the tokenizer has {len(tokens)} tokens, but kinds for {len(kinds)}")
        return cls(tokens, kinds)

    def ids(self, *, without_unused: bool = False) -> dict[str, int]:
        """Id by token. The first one counts for a token that is there twice."""
        ids: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if not (without_unused and kind == TokenKind.UNUSED):
                ids.setdefault(token, token_id)
        return ids

    def added_tokens(self) -> list[AddedToken]:
        """Tokens found in text before it is normalised and split, in the order of their ids."""
        special = (TokenKind.CONTROL, TokenKind.UNKNOWN)
        return [
            AddedToken(token, special=kind in special, normalized=False)
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in special or kind == TokenKind.USER_DEFINED
        ]


def build_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """Build the `PreTrainedTokenizerFast` that a file's metadata describes.

    Args:
        metadata: of a GGUF file, arrays as lists.

    Raises:
        ValueError: a model or pre-tokenizer that is not known, or metadata that is missing or inconsistent.
    """
    vocabulary = Vocabulary.read(metadata)
    model = metadata.get(f"{PREFIX}model")
    if model == "gpt2":
        name = metadata.get(f"{PREFIX}pre", "default")
        if name not in STYLES:
            raise ValueError(f"pre-tokenizer {name!r} is not supported; supported are {', '.join(STYLES)}")
        tokenizer = _byte_level(vocabulary, _list(metadata, "merges"), STYLES[name])
        add_bos = STYLES[name].add_bos
    elif model == "llama":
        tokenizer = _sentence_piece(vocabulary, _list(metadata, "scores"), metadata)
        add_bos = True
    else:
        raise ValueError(f"tokenizer model {model!r} is not supported; supported are gpt2, llama")
    tokenizer.add_tokens(vocabulary.added_tokens())
    special = _special_tokens(metadata, vocabulary)
    first = special.get("bos_token") if metadata.get(f"{PREFIX}add_bos_token", add_bos) else None
    last = special.get("eos_token") if metadata.get(f"{PREFIX}add_eos_token", False) else None
    if first or last:
        tokenizer.post_processor = _frame(tokenizer, first, last)
    return _wrap(tokenizer, special, metadata)


def _wrap(tokenizer: Tokenizer, special: dict[str, str], metadata: Mapping[str, Any]) -> Any:
    from transformers import PreTrainedTokenizerFast

    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **({"model_max_length": context} if context else {}),
        **special,
    )
    wrapped.chat_template = metadata.get("tokenizer.chat_template")
    return wrapped


def _byte_level(vocabulary: Vocabulary, merges: list[str], style: ByteLevelStyle) -> Tokenizer:
    """BPE over bytes, each written as a printable character (as in GPT-2)."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    wrong = next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if wrong is not None:
        raise ValueError(f"merge {wrong!r} of the tokenizer is not of two tokens")
    # Unused entries stand for ids that the original vocabulary leaves out.
    ids = vocabulary.ids(without_unused=True)
    tokenizer = _bpe(vocab=ids, merges=pairs, ignore_merges=style.whole_words)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style.words is None)
    steps: list[Any] = [byte_level]
    if style.words is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(style.words), behavior="isolated"))
    if style.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if style.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(vocabulary: Vocabulary, scores: list[float], metadata: Mapping[str, Any]) -> Tokenizer:
    """BPE over characters with spaces as a visible sign, unknown characters as bytes (as in Llama 2)."""
    if len(scores) != len(vocabulary.tokens):
        raise ValueError(f"the tokenizer has {len(vocabulary.tokens)} tokens, but {len(scores)} scores")
    if metadata.get(f"{PREFIX}remove_extra_whitespaces"):
        raise ValueError(f"metadata '{PREFIX}remove_extra_whitespaces' is not supported")
    unknown = next(
        (t for t, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == TokenKind.UNKNOWN), None
    )
    ids = vocabulary.ids()
    pairs = _merges_from_scores(ids, scores)
    tokenizer = _bpe(vocab=ids, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    leading_space = metadata.get(f"{PREFIX}add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if leading_space else replace
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if leading_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs that make a token, best token first.

    SentencePiece joins the pair whose result scores best; BPE joins the pair that comes first in the list.
    """
    pairs = []
    for token in sorted(ids, key=lambda token: -scores[ids[token]]):
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs += [pair for pair in splits if pair[0] in ids and pair[1] in ids]
    return pairs


def _bpe(**options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(**options))
    except Exception as error:  # tokenizers has no type of its own for a merge that is not in the vocabulary
        raise ValueError(f"the tokenizer's tokens and merges do not fit together: {error}") from error


def _special_tokens(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, str]:
    """`bos_token` and the like, as far as the file gives their ids."""
    special = {}
    for role, name in SPECIAL_ROLES.items():
        token_id = metadata.get(f"{PREFIX}{role}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(vocabulary.tokens):
            raise ValueError(f"{role} token {token_id} is not among the tokenizer's {len(vocabulary.tokens)} tokens")
        special[f"{name}_token"] = vocabulary.tokens[token_id]
    return special


def _frame(tokenizer: Tokenizer, first: str | None, last: str | None) -> Any:
    """Post-processor that puts `first` before and `last` after each sequence."""
    single, pair = [[token for token in (first, *body, last) if token] for body in (["$A"], ["$A", "$B"])]
    if first and last:
        pair = [first, "$A", last, first, "$B:1", last]
    used = sorted({token for token in (first, last) if token})
    return processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(token, tokenizer.token_to_id(token)) for token in used]
    )


def _list(metadata: Mapping[str, Any], name: str) -> list[Any]:
    value = metadata.get(f"{PREFIX}{name}")
    if not isinstance(value, list):
        raise ValueError(f"metadata '{PREFIX}{name}' is missing or not a list")
    return value
