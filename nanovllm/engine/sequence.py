"""A request inside the engine.

Where a token of a sequence can be, in order of position:

    |<------ computed ------>|<-- to be scheduled -->|
    |<-------------- token_ids -------------->|<---- pending ---->|

`computed` tokens have their KV written, or will have once the steps in flight are through. `pending`
tokens have been sampled on the device, but the host does not know their values yet.
"""

import enum
import logging
import time
from collections.abc import Sequence as Seq

from nanovllm.engine.detokenizer import StopChecker
from nanovllm.engine.grammar import Grammar
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger("nanovllm")


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """One prompt and what has been generated for it.

    Args:
        seq_id: number unique in the engine; also the order of arrival.
        prompt_token_ids: at least one token.
        params: how to sample.
        max_len: length, prompt included, at which the sequence ends with "length".
        seed: 64-bit seed of its random draws.
        stop_checker: looks for the stop strings, if there are any.
        grammar: what it has to follow, if anything.
        scores_prompt: collect the log-probabilities of the prompt's tokens.
        bad_words: token ids of each string that must not appear.
        rotary_offset: added to its positions where they are rows of the rotary table.
    """

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        max_len: int,
        seed: int,
        stop_checker: StopChecker | None = None,
        grammar: Grammar | None = None,
        scores_prompt: bool = False,
        bad_words: tuple[tuple[int, ...], ...] = (),
        rotary_offset: int = 0,
    ):
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        self.max_len = max_len
        self.seed = seed
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None  # stop string, stop token id, what failed; None for end-of-sequence
        self.error: Exception | None = None  # what ended it, or will with its next token
        self.stop_checker = stop_checker
        # By something else than its length.
        ends = stop_checker is not None or grammar is not None or bool(params.stop_token_ids)
        self.may_stop = ends or not params.ignore_eos
        self.batch: int | None = None  # which others it came with, if its caller gets nothing before all are through
        # What the next token may be depends on the last one: it has to be known before the next step is built.
        self.waits_for_tokens = grammar is not None
        self.grammar = grammar
        self.ended_by_grammar = False  # with a token of the text, after which nothing can follow
        self.logprobs: list[dict[int, float]] = []  # of each generated token, if asked for
        self.bad_words = bad_words
        self.rotary_offset = rotary_offset
        self.scores_prompt = scores_prompt
        self.prompt_logprobs: list[dict[int, float] | None] = [None]  # of each prompt token, as far as they are known
        self.num_streamed_tokens = 0
        # Looked at every step; plain is what needs nothing but a draw with temperature and seed.
        self.is_filtered, self.is_penalised, self.edits_logits = params.filtered, params.penalised, params.edits_logits
        reports = params.logprobs is not None or scores_prompt
        self.is_plain = not (self.is_filtered or self.is_penalised or self.edits_logits or reports)
        self.arrived = time.perf_counter()
        self.started = self.first_token = self.ended = 0.0  # times, as `arrived`
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens whose KV was found in the prefix cache at first admission
        self.num_preemptions = 0
        self.row = -1  # device row while running
        self.block_table: list[int] = []
        self.num_published_blocks = 0
        # Parent of the first block: keys that are rotated differently have another, and none is a published block's.
        self.root_uid = -rotary_offset
        self.last_published_uid = self.root_uid  # content of the last published block, parent of the next one
        self.block_chain: list[tuple[bytes, bytes]] = []  # (chain key, token ids) of full blocks, filled when asked for

    def fail(self, error: Exception) -> None:
        """End with "error", now or with the next token. For faults of this sequence alone: its batch-mates go on."""
        logger.error("request %d failed", self.seq_id, exc_info=error)
        self.error = error
        self.stop_reason = f"{type(error).__name__}: {error}"
        self.may_stop = True
        if self.status is Status.FINISHED:
            self.finish_reason = "error"

    def reset_to_waiting(self) -> None:
        """Forget everything but the known tokens."""
        self.status = Status.WAITING
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.row = -1
        self.block_table = []
        self.num_published_blocks = 0
        self.last_published_uid = self.root_uid

    @property
    def may_wait(self) -> bool:
        """It is known when it will end, and nobody looks at it before the others of its batch have ended, too."""
        return self.batch is not None and not self.may_stop and not self.scores_prompt

    @property
    def needs_prompt_scores(self) -> bool:
        return self.scores_prompt and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Length, with the tokens that are sampled but not yet known."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_completion_tokens(self) -> int:
        """Known ones."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def completion_ids_from(self, start: int) -> list[int]:
        return self.token_ids[self.num_prompt_tokens + start :]

    def metrics(self) -> dict[str, float | None]:
        """Seconds: in the queue, to the first token, and for each further one. None for what did not happen."""
        further = self.num_completion_tokens - 1
        return {
            "queue_time": self.started - self.arrived if self.started else None,
            "time_to_first_token": self.first_token - self.arrived if self.first_token else None,
            "time_per_output_token": (self.ended - self.first_token) / further if further > 0 else None,
        }
