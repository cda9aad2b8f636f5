"""Which tokens may complete a stop string: only they make a completion's text be decoded and searched at once.

Decoding costs far more than the rest of what the host does for a token, and almost no token can end one of the usual
stop strings: its text would have to hold the string's last character, after whatever of the string still fits into it.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

from nanovllm.engine.detokenizer import REPLACEMENT

PAGE = 1024  # tokens decoded together, when the first of them is drawn
MAX_REMEMBERED = 256  # sets of stop strings


class TokenTexts:
    """What each token adds to a text, decoded behind another token: at a text's beginning some lose their space.

    Args:
        tokenizer: of the model.
        skip_special_tokens: decode them to nothing.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._pages: dict[int, list[str | None]] = {}
        before = tokenizer.encode("a", add_special_tokens=False)
        self._before = before[-1:] or [0]

    def __getitem__(self, token_id: int) -> str | None:
        """None where the token has no text of its own, such as part of a character."""
        number, place = divmod(token_id, PAGE)
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = self._decode_page(number)
        return page[place]

    def _decode_page(self, number: int) -> list[str | None]:
        start, *texts = self._decode(
            [self._before, *([*self._before, i] for i in range(number * PAGE, (number + 1) * PAGE))]
        )
        return [
            text[len(start) :] if text.startswith(start) and text != start and REPLACEMENT not in text else None
            for text in texts
        ]

    def _decode(self, ids: list[list[int]]) -> list[str]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)  # of the `tokenizers` package: all in one call
        if backend is not None:
            return backend.decode_batch(ids, skip_special_tokens=self._skip)
        return [self._decode_one(some) for some in ids]

    def _decode_one(self, ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        except Exception:  # an id that the tokenizer does not have: whoever draws it hears of it
            return ""


class StopTokens:
    """Makes, for a request's stop strings, the function that tells which tokens may complete one.

    Args:
        tokenizer: of the model, or None.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._texts = lru_cache(2)(lambda skip: TokenTexts(tokenizer, skip))
        self._tests = lru_cache(MAX_REMEMBERED)(self._make_test)

    def test(self, stop: Seq[str], skip_special_tokens: bool) -> Callable[[int], bool]:
        return self._tests(tuple(stop), skip_special_tokens)

    def _make_test(self, stop: tuple[str, ...], skip_special_tokens: bool) -> Callable[[int], bool]:
        # Such a decoder takes spaces away between tokens, and in the middle of them: only single characters are sure.
        cleans = bool(getattr(self._tokenizer, "clean_up_tokenization_spaces", False))
        ends = tuple(text[-1] for text in stop) if cleans else stop
        known: dict[int, bool] = {}

        def may_complete(token_id: int) -> bool:
            answer = known.get(token_id)
            if answer is None:
                text = self._texts(skip_special_tokens)[token_id]
                answer = known[token_id] = text is None or any(may_end_in(text, end) for end in ends)
            return answer

        return may_complete


def may_end_in(text: str, stop: str) -> bool:
    """Whether `stop` can end within `text`, whatever comes before it, with the spaces at its beginning or without."""
    at = text.find(stop[-1])
    while at >= 0:
        head = text[: at + 1]
        if _end_alike(head, stop) or _end_alike(head.lstrip(), stop):
            return True
        at = text.find(stop[-1], at + 1)
    return False


def _end_alike(head: str, stop: str) -> bool:
    """One of them ends with the other."""
    return head.endswith(stop) or stop.endswith(head)
