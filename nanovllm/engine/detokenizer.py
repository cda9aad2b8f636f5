"""Text from token ids as they come, and stop strings in it.

A token may end in the middle of a character, and some tokenizers treat the beginning of a text specially. So
new text is what decoding a short window of tokens adds to decoding the window without the new ones, and it is held
back while it ends in the replacement character.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

REPLACEMENT = "\ufffd"
MAX_CHARACTER_TOKENS = 4  # a UTF-8 character has at most so many bytes, and a token at least one


class Detokenizer:
    """Incremental decoding of one completion.

    Args:
        decode: token ids to text, the tokenizer's own way.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        self._window = 0  # first token of the window
        self._read = 0  # tokens whose text is out
        self._shown = ""  # text of the window up to `_read`

    def push(self, token_ids: Seq[int]) -> str:
        """Take tokens in; return the text that is certain now."""
        self._ids.extend(token_ids)
        text = self._decode(self._ids[self._window :])
        if text.endswith(REPLACEMENT) or len(text) <= len(self._shown):
            if len(self._ids) - self._read <= 2 * MAX_CHARACTER_TOKENS:
                return ""
            return self._advance(self._settled_end(text))
        return self._advance(len(self._ids))

    def _settled_end(self, text: str) -> int:
        """Before the tokens that may still become a character, and not in the middle of one that the rest completes."""
        last = len(self._ids) - MAX_CHARACTER_TOKENS
        ends = range(last, last - MAX_CHARACTER_TOKENS, -1)
        return next((end for end in ends if text.startswith(self._decode(self._ids[self._window : end]))), last)

    @property
    def holds_back(self) -> bool:
        """Whether the text of some token is not out yet."""
        return self._read < len(self._ids)

    def flush(self) -> str:
        """The rest, when no token will follow; an unfinished character becomes a replacement character."""
        return self._advance(len(self._ids))

    def _advance(self, end: int) -> str:
        text = self._decode(self._ids[self._window : end])
        new = text[len(self._shown) :]
        self._window, self._read = self._read, end
        self._shown = self._decode(self._ids[self._window : end])
        return new


class StopChecker:
    """Looks for stop strings in a completion as its tokens come.

    Args:
        detokenizer: of this completion.
        stop: strings, none empty.
        include: leave the string that matched in the text.
        may_complete: whether a token can be where a stop string ends; the others are decoded when one of these comes.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Seq[str],
        include: bool,
        may_complete: Callable[[int], bool] = lambda token_id: True,
    ):
        self._detokenizer = detokenizer
        self._stop = stop
        self._include = include
        self._overlap = max(map(len, stop)) - 1  # a match may begin so far before the new text
        self._may_complete = may_complete
        self._put_off: list[int] = []  # tokens that complete nothing and are not decoded yet
        self.num_tokens = 0
        self.text = ""  # without the tokens that are put off
        self.matched: str | None = None

    def push(self, token_ids: Seq[int], may_stop: bool = True) -> str | None:
        """Take tokens in; return the stop string that is complete now, and cut `text` there."""
        self.num_tokens += len(token_ids)
        if self.matched is not None:
            return None
        if may_stop and not self._detokenizer.holds_back and not any(map(self._may_complete, token_ids)):
            self._put_off += token_ids
            return None
        new = self._decode(token_ids)
        if may_stop:
            return self._search(new)
        self.text += new
        return None

    def finish(self) -> None:
        """No token will follow: whatever was held back belongs to the text."""
        if self.matched is None:
            self._search(self._decode(()) + self._detokenizer.flush())

    def settle(self) -> str:
        """Decode what was put off; return the part of `text` that no later match can cut."""
        self.text += self._decode(())
        if self.matched is not None or not self._overlap:
            return self.text
        return self.text[: max(0, len(self.text) - self._overlap)]

    def _decode(self, token_ids: Seq[int]) -> str:
        """New text of what was put off and these tokens."""
        token_ids, self._put_off = [*self._put_off, *token_ids], []
        return self._detokenizer.push(token_ids) if token_ids else ""

    def _search(self, new: str) -> str | None:
        old = len(self.text)
        self.text += new
        # A match ends in the new text: what is whole before it came when nothing was to stop the completion.
        hits = [(self.text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stop]
        hits = [(at, stop) for at, stop in hits if at >= 0]
        if hits:
            at, self.matched = min(hits)
            self.text = self.text[: at + len(self.matched) if self._include else at]
        return self.matched
