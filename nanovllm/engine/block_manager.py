"""Paged KV memory: which block belongs to whom, and which prefixes are in it.

A block is in exactly one place:

    free        nobody names it, nothing of value in it
    evictable   nobody names it, but it is published: its prefix can be found again until it is reused
    referenced  `ref_counts[b]` block tables name it (published or not)

`free` and `evictable` blocks share one ordered dict, least recently used first and free ones before all
evictable ones, so that taking, returning and reviving a block are all O(1).

The prefix cache maps a chain key (hash of the parent's key and the block's token ids) to a block. A hit
also compares the token ids and the identity of the parent's content, so a collision can cost a miss but
never mix texts. At the beginning of a chain stands the sequence's root, which tells rotations of the keys apart.
"""

import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Published:
    """What is in a published block: `uid` is unique to this publication, `parent_uid` that of the block before."""

    key: bytes
    tokens: bytes
    uid: int
    parent_uid: int


def chain_key(parent: bytes, tokens: bytes) -> bytes:
    return xxhash.xxh3_128_digest(parent + tokens)


class BlockManager:
    """Hands out the blocks of a pool of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.num_shared_blocks = 0  # blocks that several block tables name
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._contents: dict[int, Published] = {}  # block -> what it holds
        self._cached: dict[bytes, int] = {}  # chain key -> block
        self._last_uid = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now, evictable ones included."""
        return len(self._unused)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def chain(self, seq: Sequence, num_blocks: int) -> list[tuple[bytes, bytes]]:
        """(chain key, token ids) of the first `num_blocks` full blocks of known tokens; computed once a sequence."""
        chain = seq.block_chain
        root = struct.pack("q", seq.root_uid) if seq.root_uid else b""
        for i in range(len(chain), num_blocks):
            tokens = struct.pack(f"{self.block_size}i", *seq.token_ids[i * self.block_size : (i + 1) * self.block_size])
            chain.append((chain_key(chain[-1][0] if chain else root, tokens), tokens))
        return chain[:num_blocks]

    def num_matchable_blocks(self, seq: Sequence) -> int:
        """Blocks that may come from the cache: at least one token must be computed, so that there are logits."""
        return (len(seq.token_ids) - 1) // self.block_size

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Blocks in the cache that hold the beginning of `seq`, at most up to its last token but one."""
        if not self.enable_prefix_caching:
            return []
        blocks: list[int] = []
        parent_uid = seq.root_uid
        for key, tokens in self.chain(seq, self.num_matchable_blocks(seq)):
            block = self._cached.get(key)
            if block is None:
                break
            content = self._contents[block]
            if content.parent_uid != parent_uid or content.tokens != tokens:
                break
            blocks.append(block)
            parent_uid = content.uid
        return blocks

    def num_blocks_needed(self, seq: Sequence, prefix: list[int]) -> int:
        """Unused blocks that admitting `seq` on top of `prefix` takes (evictable prefix blocks included)."""
        revived = sum(self.ref_counts[block] == 0 for block in prefix)
        return self.blocks_for(seq.num_tokens) - len(prefix) + revived

    def allocate(self, seq: Sequence, prefix: list[int]) -> None:
        """Give `seq` the cached `prefix` and new blocks for the rest of its tokens; the caller checked they exist."""
        assert not seq.block_table
        for block in prefix:
            if self.ref_counts[block] == 0:
                del self._unused[block]
            self.ref_counts[block] += 1
            self.num_shared_blocks += self.ref_counts[block] == 2
        seq.block_table = list(prefix)
        seq.num_published_blocks = len(prefix)
        seq.last_published_uid = self._contents[prefix[-1]].uid if prefix else seq.root_uid
        seq.num_computed_tokens = len(prefix) * self.block_size
        self.extend(seq, seq.num_tokens)

    def num_blocks_to_extend(self, seq: Sequence, num_tokens: int) -> int:
        return self.blocks_for(num_tokens) - len(seq.block_table)

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """Append new blocks until `num_tokens` tokens fit; the caller checked they exist."""
        for _ in range(self.num_blocks_to_extend(seq, num_tokens)):
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
            self.ref_counts[block] = 1
            seq.block_table.append(block)

    def publish(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Enter the blocks that are full of written KV and known tokens into the prefix cache."""
        if not self.enable_prefix_caching:
            return
        num_full = min(num_computed_tokens, len(seq.token_ids)) // self.block_size
        if num_full <= seq.num_published_blocks:
            return
        chain = self.chain(seq, num_full)
        for i in range(seq.num_published_blocks, num_full):
            seq.last_published_uid = self._publish_block(seq.block_table[i], *chain[i], seq.last_published_uid)
        seq.num_published_blocks = num_full

    def free(self, seq: Sequence) -> None:
        """Take all blocks from `seq`. The end of a prefix becomes evictable before its beginning."""
        for block in reversed(seq.block_table):
            self.ref_counts[block] -= 1
            self.num_shared_blocks -= self.ref_counts[block] == 1
            if self.ref_counts[block] == 0:
                self._unused[block] = None
                if block not in self._contents:
                    self._unused.move_to_end(block, last=False)
        seq.block_table = []
        seq.num_published_blocks = 0
        seq.last_published_uid = seq.root_uid
        seq.num_computed_tokens = 0

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Running sequences keep their blocks and publish none of what they have so far."""
        for block in list(self._contents):
            self._forget(block)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless every block is in exactly one place, given all sequences that hold blocks."""
        counts = [0] * self.num_blocks
        for seq in sequences:
            for block in seq.block_table:
                counts[block] += 1
        if counts != self.ref_counts:
            raise RuntimeError(f"reference counts {self.ref_counts} differ from the block tables' {counts}")
        num_shared = sum(count > 1 for count in counts)
        if num_shared != self.num_shared_blocks:
            raise RuntimeError(f"{self.num_shared_blocks} blocks are counted as shared, should be {num_shared}")
        unused = {block for block, count in enumerate(counts) if count == 0}
        if unused != set(self._unused):
            raise RuntimeError(f"unused blocks are {sorted(self._unused)}, should be {sorted(unused)}")
        for key, block in self._cached.items():
            if self._contents[block].key != key:
                raise RuntimeError(f"block {block} is cached under a key that is not its own")

    def _publish_block(self, block: int, key: bytes, tokens: bytes, parent_uid: int) -> int:
        """Enter `block` under `key`, unless its text is there already; return the uid under which the text is known."""
        twin = self._cached.get(key)
        if twin is not None:
            content = self._contents[twin]
            if content.tokens == tokens and content.parent_uid == parent_uid:
                return content.uid  # this copy stays private; what follows it hangs on the twin
            self._forget(twin)
        self._last_uid += 1
        self._contents[block] = Published(key, tokens, self._last_uid, parent_uid)
        self._cached[key] = block
        return self._last_uid

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block, None)
        if content is not None:
            del self._cached[content.key]
            if block in self._unused:
                self._unused.move_to_end(block, last=False)
