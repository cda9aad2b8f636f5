"""Tokenizers built from GGUF metadata: the default model's in full, the other kinds on small vocabularies."""

import random

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanovllm.utils.default_model import default_model_path
from nanovllm.utils.gguf import GGUFCheckpoint
from nanovllm.utils.gguf_tokenizer import build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

TEXTS = [
    "",
    "Hello world",
    "  two leading spaces, one trailing ",
    "In 2024 it cost 12345.67 dollars",
    "def f(x):\n    return x ** 2  # comment\n\n\n\tpass\r\n",
    "你好世界。2024年",
    "日本語のテキスト",
    "👍🏽 and 👨‍👩‍👧 emoji",
    "I'll say we'RE don't",
    "caf\u00e9 cafe\u0301 \u00bd \u0663\u0664",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> x",
    "\x00\x7f\xa0",
]


@pytest.fixture(scope="module")
def smollm2():
    return GGUFCheckpoint(default_model_path()).tokenizer()


@pytest.fixture(scope="module")
def smollm2_reference():
    """SmolLM2's own pipeline on the vocabulary as another reader finds it."""
    fields = gguf.GGUFReader(default_model_path()).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:17]])
    return tokenizer


def random_texts(count: int) -> list[str]:
    rng = random.Random(11)
    ranges = [(32, 127), (32, 127), (48, 58), (9, 14), (0xA0, 0x2FFF), (0x4E00, 0x9000), (0x1F600, 0x1F640)]
    return ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(60))) for _ in range(count)]


def test_smollm2_encodes_and_decodes_like_its_own_pipeline(smollm2, smollm2_reference):
    for text in TEXTS + random_texts(200):
        ids = smollm2.encode(text)
        assert ids == smollm2_reference.encode(text).ids, text
        assert smollm2.decode(ids) == text
        for skip in (False, True):
            assert smollm2.decode(ids, skip_special_tokens=skip) == smollm2_reference.decode(ids, skip), text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [19556, 905]),
        ("x = 2024", [104, 446, 216, 34, 32, 34, 36]),
        (" 12", [216, 33, 34]),
        ("<|im_start|>user\n", [1, 4093, 198]),
        ("<|im_end|>", [2]),
    ],
)
def test_smollm2_ids(smollm2, text, ids):
    assert smollm2.encode(text) == ids


def test_smollm2_special_tokens(smollm2):
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (smollm2.pad_token, smollm2.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert (len(smollm2), smollm2.vocab_size, smollm2.model_max_length) == (49152, 49152, 8192)
    assert all(smollm2.decode([i], skip_special_tokens=True) == "" for i in range(17))
    assert list(smollm2("hi")) == ["input_ids", "attention_mask"]


def test_smollm2_chat_template(smollm2):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 12"}]
    text = smollm2.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    system, user = "<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\nHi 12<|im_end|>\n"
    assert text == f"{system}{user}<|im_start|>assistant\n"
    default = smollm2.apply_chat_template(messages[1:], tokenize=False)
    assert default.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert default.endswith(user)


def byte_level(pre: str | None, *, merges=(), extra=(), **metadata):
    """Metadata of a tokenizer of all bytes, tokens made by `merges` and `extra` (token, kind)."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += ["".join(merge) for merge in merges]
    kinds = [NORMAL] * len(tokens) + [kind for _, kind in extra]
    named = {"tokens": tokens + [token for token, _ in extra], "token_type": kinds, "model": "gpt2", **metadata}
    named["merges"] = [" ".join(merge) for merge in merges]
    if pre is not None:
        named["pre"] = pre
    return {f"tokenizer.ggml.{name}": value for name, value in named.items()}


def words(tokenizer, text: str) -> list[str]:
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


GPT2_TAIL = [".", "\n\n ", " (", "I", "'", "LL", ")"]
CASELESS_TAIL = [".\n\n", " ", " (", "I", "'LL", ")"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", *GPT2_TAIL]),
        ("default", ["It", "'s", " 12345", *GPT2_TAIL]),
        (None, ["It", "'s", " 12345", *GPT2_TAIL]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", *GPT2_TAIL]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", *CASELESS_TAIL]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", *CASELESS_TAIL]),
    ],
)
def test_how_each_pre_tokenizer_splits(pre, expected):
    tokenizer = build_tokenizer(byte_level(pre))
    text = "It's 12345.\n\n  (I'LL)"
    assert words(tokenizer, text) == expected
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_unknown_pre_tokenizer_is_named():
    with pytest.raises(ValueError, match="pre-tokenizer 'tekken' is not supported; supported are default, gpt-2"):
        build_tokenizer(byte_level("tekken"))


def test_unknown_model_is_named():
    with pytest.raises(ValueError, match="tokenizer model 'bert' is not supported"):
        build_tokenizer(byte_level("qwen2", model="bert"))


def test_only_qwen2_composes_characters():
    decomposed = "e\u0301"
    assert [len(build_tokenizer(byte_level(pre)).encode(decomposed)) for pre in ("qwen2", "gpt-2")] == [2, 3]


def test_llama_bpe_takes_whole_words_without_merges():
    tokens = byte_level("llama-bpe", extra=[("word", NORMAL)])
    assert build_tokenizer(tokens).encode("word") == [256]
    assert len(build_tokenizer(byte_level("qwen2", extra=[("word", NORMAL)])).encode("word")) == 4


def test_kinds_of_added_tokens():
    extra = [("<|end|>", CONTROL), ("<tool>", USER_DEFINED), ("[PAD2]", UNUSED), ("plain", NORMAL)]
    tokenizer = build_tokenizer(byte_level("qwen2", extra=extra))
    ids = tokenizer.encode("a<|end|><tool>[PAD2]plain")
    assert 256 in ids
    assert 257 in ids
    assert not {258, 259} & set(ids)  # neither is found in text, and no merges lead to the second
    assert tokenizer.decode([256, 257, 259]) == "<|end|><tool>plain"
    assert tokenizer.decode([256, 257, 258, 259], skip_special_tokens=True) == "<tool>plain"


@pytest.mark.parametrize(
    ("pre", "metadata", "expected"),
    [
        ("qwen2", {}, [0]),
        ("llama-bpe", {}, [256, 0]),
        ("llama-bpe", {"add_bos_token": False}, [0]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [256, 0, 257]),
        ("gpt-2", {"add_eos_token": True}, [0, 257]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(pre, metadata, expected):
    extra = [("<s>", CONTROL), ("</s>", CONTROL)]
    tokenizer = build_tokenizer(byte_level(pre, extra=extra, bos_token_id=256, eos_token_id=257, **metadata))
    text = "!"
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode(text, add_special_tokens=False) == [0]
    assert tokenizer.decode(expected, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"merges": ["a b c"]}, "merge 'a b c' of the tokenizer is not of two tokens"),
        ({"merges": ["a b"]}, "tokens and merges do not fit together"),
        ({"merges": None}, r"'tokenizer\.ggml\.merges' is missing"),
        ({"token_type": [1, 1]}, "256 tokens, but kinds for 2"),
        ({"eos_token_id": 256}, "eos token 256 is not among the tokenizer's 256 tokens"),
    ],
)
def test_inconsistent_metadata(metadata, message):
    broken = byte_level("qwen2") | {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    with pytest.raises(ValueError, match=message):
        build_tokenizer(broken)


def sentence_piece(**metadata):
    special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    pieces = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    plain = ["\u2581h", "el", "lo", "hel", "\u2581hel", "\u2581hello", "\u2581", "h", "e", "l", "o", "12"]
    tokens = special + pieces + [(piece, NORMAL) for piece in plain]
    named = {"model": "llama", "tokens": [token for token, _ in tokens], "token_type": [kind for _, kind in tokens]}
    named["scores"] = [0.0] * 259 + [-float(i) for i in range(len(plain))]
    named |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **metadata}
    return {f"tokenizer.ggml.{name}": value for name, value in named.items()}


def test_sentence_piece():
    tokenizer = build_tokenizer(sentence_piece())
    ids = tokenizer.get_vocab()
    assert tokenizer.encode("hello") == [1, ids["\u2581hello"]]
    assert tokenizer.encode("hello", add_special_tokens=False) == [ids["\u2581hello"]]
    # "el" scores better than "hel" or what follows, "▁h" best of all: ▁h + el + lo
    assert tokenizer.tokenize("hello hel") == ["\u2581hello", "\u2581hel"]
    assert tokenizer.tokenize("ohello") == ["\u2581", "o", "hel", "lo"]
    assert tokenizer.tokenize("\n\u4f60") == ["\u2581", "<0x0A>", "<0xE4>", "<0xBD>", "<0xA0>"]
    for text in ("hello", "  hello\n \u4f60\U0001f600 hel", "hello</s>"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]


def test_sentence_piece_without_prefix():
    tokenizer = build_tokenizer(sentence_piece(add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert tokenizer.tokenize("hello") == ["hel", "lo"]
    assert tokenizer.encode("")[-1] == 2
    assert tokenizer.decode(tokenizer.encode(" hello"), skip_special_tokens=True) == " hello"


def test_sentence_piece_needs_scores():
    with pytest.raises(ValueError, match="271 tokens, but 1 scores"):
        build_tokenizer(sentence_piece(scores=[0.0]))
