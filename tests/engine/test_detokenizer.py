"""Incremental text equals one-shot text; stop strings are found across tokens and never shown in part."""

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from nanovllm.engine.detokenizer import Detokenizer, StopChecker
from nanovllm.engine.stop_tokens import StopTokens, may_end_in
from tests.helpers import byte_tokenizer


def merged_tokenizer():
    """With tokens of several characters, some of which begin with a space."""
    tokenizer = byte_tokenizer()
    words = ["ab", "ba", "aab", "Ġa", "Ġab", "bĠ", "ĠĠ", "aĠb"]
    vocab = {**tokenizer.get_vocab(), **{word: 258 + i for i, word in enumerate(words)}}
    merges = [("a", "b"), ("b", "a"), ("a", "ab"), ("Ġ", "a"), ("Ġ", "ab"), ("b", "Ġ"), ("Ġ", "Ġ"), ("aĠ", "b")]
    vocab["aĠ"] = 258 + len(words)
    merges.insert(-1, ("a", "Ġ"))
    tokenizer.backend_tokenizer.model = models.BPE(vocab=vocab, merges=merges)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


MERGED = merged_tokenizer()
MERGED_STOP_TOKENS = StopTokens(MERGED)
TOKENIZER = byte_tokenizer()  # one token a byte: every character but ASCII is cut
TEXTS = [
    "plain",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family 🇩🇪",
    "e\u0301 combining",
    "mixed 漢 é 🙂 end",
    "\ufffd real one",
]


STOP_TOKENS = StopTokens(TOKENIZER)


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_the_text_and_none_is_half_a_character(text):
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push([i]) for i in encode(text)]
    assert "".join(pieces) + detokenizer.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=10))
@example(b"\xf0\x9f\x99" * 12 + "🙂".encode(), [1])
@example(b"\0\0\0\x80\0\x80\0\xc2\x80\x80\0\x80", [2])  # a character where the broken bytes are let go
def test_any_bytes_in_any_steps_give_the_one_shot_text(data, steps):
    """Broken UTF-8 too: what can never become a character is not held back for ever."""
    alphabet = {bytes([b]): i for b, i in byte_ids().items()}
    ids = [alphabet[bytes([b])] for b in data]
    detokenizer, text, at, turn = Detokenizer(decode), "", 0, 0
    while at < len(ids):
        n = steps[turn % len(steps)]
        text += detokenizer.push(ids[at : at + n])
        at, turn = at + n, turn + 1
    assert text + detokenizer.flush() == decode(ids)


@cache
def byte_ids():
    from tokenizers.pre_tokenizers import ByteLevel

    table = {}
    for b in range(256):
        if b < 128:
            char = bytes([b]).decode()
            table[b] = encode(char)[0]
    rest = sorted(set(range(2, 258)) - set(table.values()))
    # Bytes above 127 appear in two-byte characters: read their ids off the encodings of those.
    for code in range(0x80, 0x800):
        raw = chr(code).encode()
        for byte, token in zip(raw, encode(chr(code)), strict=True):
            table[byte] = token
    for byte in set(range(256)) - set(table):
        table[byte] = rest[0]  # bytes that UTF-8 never uses: any broken one will do
    assert len(ByteLevel.alphabet()) == 256
    return table


def checker(stop, include=False):
    return StopChecker(Detokenizer(decode), stop, include)


def test_tokens_that_complete_nothing_are_not_decoded_one_by_one():
    calls = []

    def counting(ids):
        calls.append(ids)
        return decode(ids)

    test = StopTokens(TOKENIZER).test(("END",), True)
    stop = StopChecker(Detokenizer(counting), ("END",), False, test)
    for i in encode("no such thing in sight 日本"):
        assert stop.push([i]) is None
    ascii_only = len(encode("no such thing in sight "))
    assert 0 < len(calls) <= 3 * len(encode("日本"))
    assert len(calls[0]) == ascii_only + 1
    assert [stop.push([i]) for i in encode(" EEND")][-1] == "END"
    assert stop.text == "no such thing in sight 日本 E"


@settings(max_examples=300, deadline=None)
@given(st.text("abé ", max_size=30), st.lists(st.text("abé ", min_size=1, max_size=4), min_size=1, max_size=3))
def test_putting_off_changes_no_match(text, stops):
    """Byte tokens and, with merges, tokens of several letters and spaces; text as it stands after each token."""
    for tokenizer, stop_tokens in ((TOKENIZER, STOP_TOKENS), (MERGED, MERGED_STOP_TOKENS)):
        make = lambda tokenizer=tokenizer: Detokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))  # noqa: E731
        quick = StopChecker(make(), stops, False, stop_tokens.test(stops, True))
        plain = StopChecker(make(), stops, False)
        for i in tokenizer.encode(text, add_special_tokens=False):
            assert quick.push([i]) == plain.push([i])
            if quick.matched:
                break
        quick.finish()
        plain.finish()
        assert (quick.text, quick.matched) == (plain.text, plain.matched)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("END", "END", True),
        ("xENDx", "END", True),
        ("ND", "END", True),
        (" ND", "END", True),  # a decoder may take the space away
        ("xND", "END", False),
        ("EN", "END", False),
        ("D.D", "END.", True),
        ("xD.D", "END.", False),
        ("x D", "END.D", False),
        ("\n", "\n\n", True),
        ("a ", " ", True),
        ("question", "\nQuestion", False),
        (" on", "\nQuestion", True),
    ],
)
def test_where_a_stop_string_may_end(text, stop, expected):
    assert may_end_in(text, stop) is expected


@pytest.mark.parametrize("text", ["one END two", "oneEND", "ENDone", "日本END語"])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens_ends_and_cuts(text, include):
    stop = checker(("END", "never"), include)
    pushed = [stop.push([i]) for i in encode(text)]
    end = text.index("END") + 3
    assert pushed.index("END") == len(encode(text[:end])) - 1
    assert stop.matched == "END"
    assert stop.text == (text[:end] if include else text[: end - 3])


def test_earliest_of_several_stop_strings_wins():
    stop = checker(("lo wo", "llo", "zzz"))
    matches = [stop.push([i]) for i in encode("hello world")]
    assert next(m for m in matches if m) == "llo"
    assert stop.text == "he"


@pytest.mark.parametrize("stops", [("ab",), ("ab", "never this one")])
def test_a_match_that_was_not_to_stop_stays_in_the_text(stops):
    """With `min_tokens`: what else is looked for, how far ever back, must not find it later."""
    stop = checker(stops)
    assert all(stop.push([i], may_stop=False) is None for i in encode("xaby"))
    assert all(stop.push([i]) is None for i in encode(" yz a"))
    assert stop.push(encode("b")) == "ab"
    assert stop.text == "xaby yz "


def test_settled_text_never_holds_a_part_that_is_cut_later():
    stop = checker(("</answer>",))
    shown = ""
    for i in encode("42 </ans no </answer>"):
        match = stop.push([i])
        now = stop.text if match else stop.settle()
        assert now.startswith(shown)
        shown = now
        if match:
            break
    assert shown == "42 </ans no "


def test_before_min_tokens_nothing_stops_and_a_match_from_then_is_not_found_later():
    stop = checker(("ab",))
    for i in encode("xab"):
        assert stop.push([i], may_stop=False) is None
    assert stop.push(encode("y")) is None
    assert stop.push(encode("ab")) == "ab"
    assert stop.text == "xaby"


def test_unfinished_match_is_part_of_the_text_in_the_end():
    stop = checker(("END",))
    for i in encode("one EN"):
        stop.push([i])
    stop.finish()
    assert stop.matched is None
    assert stop.text == "one EN"
