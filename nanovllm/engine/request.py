"""A request as the user sees it: one prompt, `n` completions, their text and their figures."""

from dataclasses import dataclass
from typing import Any

from nanovllm.engine.detokenizer import Detokenizer, StopChecker
from nanovllm.engine.grammar import GrammarCompiler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.stop_tokens import StopTokens
from nanovllm.layers.rotary_embedding import LongRope
from nanovllm.sampling_params import SamplingParams

Output = dict[str, Any]


@dataclass(frozen=True)
class StreamOutput:
    """What came new for one completion.

    Args:
        index: which prompt.
        completion: which of its `n` completions.
        text: new text; never withdrawn later.
        token_ids: new token ids.
        finished: nothing follows for this completion.
        finish_reason, stop_reason: as in `generate`'s output, once finished.
        logprobs: of the new ids, as in `generate`'s output, where asked for.
        prompt_logprobs: likewise, in the first output of a prompt's first completion.
    """

    index: int
    completion: int
    text: str
    token_ids: list[int]
    finished: bool
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[dict[int, Output]] | None = None
    prompt_logprobs: list[dict[int, Output] | None] | None = None


class Request:
    """`n` sequences of one prompt; `request_id` is the first one's id."""

    def __init__(self, sequences: list[Sequence], tokenizer: Any):
        self.sequences = sequences
        self.by_step = False  # reported by `step`; otherwise by the call that made it
        self._tokenizer = tokenizer
        self._streams = [Stream(seq, tokenizer) for seq in sequences] if tokenizer is not None else []

    @property
    def request_id(self) -> int:
        return self.sequences[0].seq_id

    @property
    def params(self) -> SamplingParams:
        return self.sequences[0].params

    @property
    def finished(self) -> bool:
        return all(seq.status is Status.FINISHED for seq in self.sequences)

    def output(self) -> Output:
        """The dict that `generate` returns for this prompt."""
        first = self.sequences[0]
        prompt_logprobs = self._prompt_logprobs(first)
        completions = [self._completion(seq) for seq in self.sequences]
        out: Output = {
            **completions[0],
            "prompt_token_ids": first.token_ids[: first.num_prompt_tokens],
            "num_cached_tokens": first.num_cached_tokens,
            "metrics": first.metrics(),
        }
        if self.params.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs
        if len(completions) > 1:
            out["completions"] = completions
        return out

    def increments(self, index: int) -> list[StreamOutput]:
        """What came new since the last call, for each completion that has something."""
        news = [self._increment(index, i, seq) for i, seq in enumerate(self.sequences)]
        return [new for new in news if new is not None]

    def _completion(self, seq: Sequence) -> Output:
        text, logprobs = None, None
        if seq.error is None:
            try:
                text, logprobs = self._text(seq), self._logprobs(seq)
            except Exception as error:  # the tokenizer's own, at what this completion alone has drawn
                seq.fail(error)
        out: Output = {
            "text": text,
            "token_ids": seq.completion_token_ids,
            "finish_reason": seq.finish_reason,
            "stop_reason": seq.stop_reason,
        }
        if logprobs is not None:
            out["logprobs"] = logprobs
        return out

    def _text(self, seq: Sequence) -> str | None:
        if self._tokenizer is None or not self.params.detokenize:
            return None
        if seq.stop_checker is not None:
            seq.stop_checker.finish()
            return seq.stop_checker.text
        return self._tokenizer.decode(text_ids(seq), skip_special_tokens=self.params.skip_special_tokens)

    def _prompt_logprobs(self, seq: Sequence) -> list[dict[int, Output] | None] | None:
        try:
            return [None if entry is None else self._with_tokens(entry) for entry in seq.prompt_logprobs]
        except Exception as error:  # as in `_completion`
            seq.fail(error)
            return None

    def _logprobs(self, seq: Sequence, start: int = 0) -> list[dict[int, Output]] | None:
        """Of the completion's tokens from `start` on."""
        return None if self.params.logprobs is None else [self._with_tokens(entry) for entry in seq.logprobs[start:]]

    def _with_tokens(self, entry: dict[int, float]) -> dict[int, Output]:
        """{id: {"logprob", "token"}}, the drawn token first, then the most likely ones in order."""
        with_text = self._tokenizer is not None and self.params.detokenize
        decode = self._tokenizer.decode if with_text else lambda ids: None
        return {token_id: {"logprob": value, "token": decode([token_id])} for token_id, value in entry.items()}

    def _increment(self, index: int, i: int, seq: Sequence) -> StreamOutput | None:
        finished = seq.status is Status.FINISHED
        sent = seq.num_streamed_tokens
        if sent < 0 or (seq.num_completion_tokens == sent and not finished):
            return None
        new_ids = seq.completion_ids_from(sent)
        text, logprobs = "", None
        if seq.error is None:
            try:
                if self._streams and self.params.detokenize:
                    text = self._streams[i].advance(finished)
                logprobs = self._logprobs(seq, sent)
            except Exception as error:  # as above; told with the sequence's end, which is its next token at the latest
                seq.fail(error)
        scored = self.params.prompt_logprobs is not None and i == sent == 0
        prompt_logprobs = self._prompt_logprobs(seq) if scored else None
        seq.num_streamed_tokens = -1 if finished else sent + len(new_ids)  # -1: the end has been told
        ends = (finished, seq.finish_reason, seq.stop_reason)
        return StreamOutput(index, i, text, new_ids, *ends, logprobs, prompt_logprobs)


class Stream:
    """Text of one completion as it becomes certain."""

    def __init__(self, seq: Sequence, tokenizer: Any):
        self._seq = seq
        self._detokenizer = completion_detokenizer(tokenizer, seq.params)
        self._taken = 0  # tokens given to the detokenizer, or characters taken from the stop checker's text

    def advance(self, finished: bool) -> str:
        checker = self._seq.stop_checker
        if checker is not None:
            if finished:
                checker.finish()
            text = checker.text if finished else checker.settle()
            new, self._taken = text[self._taken :], max(self._taken, len(text))
            return new
        new_ids = text_ids(self._seq, self._taken)
        self._taken += len(new_ids)
        new = self._detokenizer.push(new_ids)
        return new + self._detokenizer.flush() if finished else new


def text_ids(seq: Sequence, start: int = 0) -> list[int]:
    """Completion ids that show in the text, from `start` on: a token that ended it does not, unless asked for."""
    ids = seq.completion_ids_from(start)
    by_text = seq.ended_by_grammar or (seq.stop_checker is not None and seq.stop_checker.matched is not None)
    return (
        ids[:-1] if seq.finish_reason == "stop" and not by_text and not seq.params.include_stop_str_in_output else ids
    )


def completion_detokenizer(tokenizer: Any, params: SamplingParams) -> Detokenizer:
    return Detokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens))


def stop_checker(tokenizer: Any, params: SamplingParams, stop_tokens: StopTokens) -> StopChecker | None:
    """A checker when the request has stop strings."""
    if not params.stop:
        return None
    may_complete = stop_tokens.test(params.stop, params.skip_special_tokens)
    detokenizer = completion_detokenizer(tokenizer, params)
    return StopChecker(detokenizer, params.stop, params.include_stop_str_in_output, may_complete)


def bad_word_forms(word: str) -> tuple[str, str]:
    """At the beginning of a text and after a space."""
    return word, " " + word


def bad_word_ids(tokenizer: Any, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Tokens of each bad word, in all its forms."""
    texts = [text for word in params.bad_words for text in bad_word_forms(word)]
    ids = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return tuple(dict.fromkeys(word for word in ids if word))


def make_request(
    first_id: int,
    ids: list[int],
    params: SamplingParams,
    max_len: int,
    engine_seed: int,
    tokenizer: Any,
    grammars: GrammarCompiler,
    stop_tokens: StopTokens,
    long_rope: LongRope | None = None,
) -> Request:
    """The sequences of a prompt.

    Args:
        first_id: of the first of `params.n` sequences; the others follow.
        ids: prompt token ids.
        params: of all of them.
        max_len: length at which any sequence of the engine ends.
        engine_seed: what seeds are derived from where `params` has none.
        tokenizer: of the model, or None.
        grammars, stop_tokens, long_rope: of the engine.
    """
    if params.max_tokens is not None:
        max_len = min(max_len, len(ids) + params.max_tokens)
    bad_words = bad_word_ids(tokenizer, params)
    base = request_seed(engine_seed, first_id) if params.seed is None else params.seed
    sequences = [
        Sequence(
            first_id + i,
            ids,
            params,
            max_len,
            completion_seed(base, i),
            stop_checker(tokenizer, params, stop_tokens),
            grammars.start(params),
            scores_prompt=params.prompt_logprobs is not None and i == 0,  # the prompt is the same for all
            bad_words=bad_words,
            rotary_offset=0 if long_rope is None else long_rope.offset_for(max_len),
        )
        for i in range(params.n)
    ]
    return Request(sequences, tokenizer)


def request_seed(engine_seed: int, seq_id: int) -> int:
    """Seed of a request's draws: any 64-bit mix of both does; this one is invertible in `seq_id`."""
    return _signed(engine_seed * 0x9E3779B97F4A7C15 + (seq_id + 1) * 0xBF58476D1CE4E5B9)


def completion_seed(seed: int, completion: int) -> int:
    """Seed of one of `n` completions; the first one's is the request's own."""
    return _signed(seed + completion * 0x94D049BB133111EB)


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
