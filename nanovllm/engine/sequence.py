"""A request inside the engine.

Where a token of a sequence can be, in order of position:

    |<------ computed ------>|<-- to be scheduled -->|
    |<-------------- token_ids -------------->|<---- pending ---->|

`computed` tokens have their KV written, or will have once the steps in flight are through. `pending`
tokens have been sampled on the device, but the host does not know their values yet.
"""

import enum
from collections.abc import Sequence as Seq

from nanovllm.sampling_params import SamplingParams


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
    """

    def __init__(self, seq_id: int, prompt_token_ids: Seq[int], params: SamplingParams, max_len: int, seed: int):
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        self.max_len = max_len
        self.seed = seed
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens whose KV was found in the prefix cache at first admission
        self.num_preemptions = 0
        self.row = -1  # device row while running
        self.block_table: list[int] = []
        self.num_published_blocks = 0
        self.last_published_uid = 0  # content of the last published block, parent of the next one
        self.block_chain: list[tuple[bytes, bytes]] = []  # (chain key, token ids) of full blocks, filled when asked for

    def reset_to_waiting(self) -> None:
        """Forget everything but the known tokens."""
        self.status = Status.WAITING
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.row = -1
        self.block_table = []
        self.num_published_blocks = 0
        self.last_published_uid = 0

    @property
    def num_tokens(self) -> int:
        """Length, with the tokens that are sampled but not yet known."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def at_max_len(self) -> bool:
        """True when no further token may be sampled, whatever the pending ones turn out to be."""
        return self.num_tokens >= self.max_len

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]
