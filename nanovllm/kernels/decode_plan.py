"""Work list and workspace of decode attention: made once a step, on the device, for all layers.

Under a CUDA graph the grid is fixed while lengths change from replay to replay, so the device chooses the split size:
`DecodePlan.update` spreads the batch's tokens over a bounded number of work items, and attention launches that bound.
The size adapts to the work there is: nothing depends on the longest sequence the engine allows.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from nanovllm.kernels.shared_prefixes import SharedPrefixes

# int32s of a work item: sequence, table row, first and end key, first item, items, then the first visible key (under a
# window), or the first of the sequence's shared parts and their number
ITEM_FIELDS = 8
PROGRAMS_PER_CORE = 2  # of a wave, a multiprocessor: one reads too slowly, more cut splits whose merging costs more
MIN_SPLIT = 256  # keys, where there are work items enough: merging costs more than uneven lengths
SPREAD = 2  # work items a sequence, beyond the one wave, that even out lengths


@triton.jit
def _pieces(length, hidden, split, GRAIN: tl.constexpr, SPARSE: tl.constexpr):
    """(size, number) of the splits of what is not hidden: equal ones of at most `split` keys, only a lone one empty.

    SPARSE: none at all of an empty sequence.
    """
    own = length - hidden
    size = tl.maximum(tl.cdiv(tl.cdiv(own, tl.maximum(tl.cdiv(own, split), 1)), GRAIN), 1) * GRAIN
    number = tl.maximum(tl.cdiv(own, size), 1)
    return size, tl.where(length > 0, number, 0) if SPARSE else number


@triton.jit
def _hidden(length, hidden_ptr, seq, mask, WINDOW: tl.constexpr, SHARED: tl.constexpr, GRAIN: tl.constexpr):
    """Leading keys that a sequence's own pass leaves out: the first pass has seen them, or a window hides them.

    Under a window, a multiple of the grain.
    """
    if SHARED:
        return tl.load(hidden_ptr + seq, mask=mask, other=0)
    elif WINDOW == 0:
        return length * 0
    else:
        return tl.maximum(length - WINDOW, 0) // GRAIN * GRAIN


@triton.jit(
    do_not_specialize=["batch", "max_items", "many", "min_split", "first_slot"],
    do_not_specialize_on_alignment=["rows_ptr", "context_lens_ptr", "hidden_ptr", "bases_ptr", "parts_ptr"],
)
def _plan_kernel(
    items_ptr, count_ptr, rows_ptr, context_lens_ptr, hidden_ptr, bases_ptr, parts_ptr, batch, max_items,
    many, min_split, first_slot,
    GRAIN: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr,
    SPARSE: tl.constexpr,
):  # fmt: skip
    """One program a sequence: write the sequence's work items; program 0 also their number over the batch.

    Every program reads all lengths, twice (the sum sets the split size, the size the offsets): cheaper than a second
    launch. The items number at most `max_items`, which leaves one for each sequence's last split, which may be short.
    `min_split` holds for `many` sequences and more.
    """
    seq = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.int64)
    present = tl.zeros([CHUNK], tl.int32)
    for chunk in range(0, batch, CHUNK):
        index = chunk + lanes
        lengths = tl.load(context_lens_ptr + index, mask=index < batch, other=0)
        total += lengths - _hidden(lengths, hidden_ptr, index, index < batch, WINDOW, SHARED, GRAIN)
        present += (lengths > 0).to(tl.int32)
    num_seqs = tl.sum(present) if SPARSE else batch
    least = tl.where(num_seqs >= many, min_split, GRAIN)
    split = tl.cdiv(tl.maximum(tl.cdiv(tl.sum(total), max_items - num_seqs), least), GRAIN).to(tl.int32) * GRAIN

    before = tl.zeros([CHUNK], tl.int32)
    count = tl.zeros([CHUNK], tl.int32)
    for chunk in range(0, batch, CHUNK):
        index = chunk + lanes
        lengths = tl.load(context_lens_ptr + index, mask=index < batch, other=0)
        hidden = _hidden(lengths, hidden_ptr, index, index < batch, WINDOW, SHARED, GRAIN)
        _, numbers = _pieces(lengths, hidden, split, GRAIN, SPARSE)
        count += tl.where(index < batch, numbers, 0)
        before += tl.where(index < seq, numbers, 0)
    first = tl.sum(before)
    if seq == 0:
        tl.store(count_ptr, tl.sum(count))

    length = tl.load(context_lens_ptr + seq)
    row = tl.load(rows_ptr + seq)
    skipped = _hidden(length, hidden_ptr, seq, True, WINDOW, SHARED, GRAIN)
    piece, splits = _pieces(length, skipped, split, GRAIN, SPARSE)
    for chunk in range(0, splits, CHUNK):
        index = chunk + lanes
        mask = index < splits
        item = items_ptr + (first + index) * FIELDS
        tl.store(item, tl.zeros([CHUNK], tl.int32) + seq, mask=mask)
        tl.store(item + 1, tl.zeros([CHUNK], tl.int32) + row, mask=mask)
        tl.store(item + 2, skipped + index * piece, mask=mask)
        tl.store(item + 3, tl.minimum(skipped + (index + 1) * piece, length), mask=mask)
        tl.store(item + 4, tl.zeros([CHUNK], tl.int32) + first, mask=mask)
        tl.store(item + 5, tl.zeros([CHUNK], tl.int32) + splits, mask=mask)
        if WINDOW:
            tl.store(item + 6, tl.zeros([CHUNK], tl.int32) + tl.maximum(length - WINDOW, 0), mask=mask)
        if SHARED:
            tl.store(item + 6, tl.zeros([CHUNK], tl.int32) + first_slot + tl.load(bases_ptr + seq), mask=mask)
            tl.store(item + 7, tl.zeros([CHUNK], tl.int32) + tl.load(parts_ptr + seq), mask=mask)


@dataclass(frozen=True)
class DecodePlan:
    """Work list and workspace of decode attention, shared by all layers and by the graphs of all batch sizes."""

    items: torch.Tensor  # [capacity, ITEM_FIELDS] int32
    count: torch.Tensor  # [1] int32, the items in use
    partial: torch.Tensor  # [capacity and shared parts, num_q_heads, head_dim] float32, each split's normalised output
    lse: torch.Tensor  # [capacity and shared parts, num_q_heads] float32, log2 of each split's exponential sum
    arrived: torch.Tensor  # [max_batch, num_kv_heads] int32, splits done; zero between launches
    wave: int  # work items that fill the GPU once
    grain: int = 64  # keys; split sizes are multiples of it
    window: int | None = None  # keys that a token sees, itself included; None: all

    @classmethod
    def create(
        cls,
        max_batch: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        share: bool = False,
    ) -> "DecodePlan":
        """Allocate for batches of up to `max_batch` sequences; `share`: with places for parts of shared prefixes."""
        device = torch.device(device)
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        wave = -(-cores * PROGRAMS_PER_CORE // num_kv_heads)
        capacity = wave + (SPREAD + 1) * max_batch
        slots = capacity + (SharedPrefixes.max_parts(max_batch) if share else 0)
        return cls(
            items=torch.zeros((capacity, ITEM_FIELDS), dtype=torch.int32, device=device),
            count=torch.zeros(1, dtype=torch.int32, device=device),
            partial=torch.empty((slots, num_q_heads, head_dim), dtype=torch.float32, device=device),
            lse=torch.empty((slots, num_q_heads), dtype=torch.float32, device=device),
            arrived=torch.zeros((max_batch, num_kv_heads), dtype=torch.int32, device=device),
            wave=wave,
        )

    @property
    def capacity(self) -> int:
        """Work items at most; the parts of shared prefixes follow them in the workspace."""
        return self.items.shape[0]

    def with_window(self, window: int) -> "DecodePlan":
        """For layers that see the last `window` keys only: a work list of its own in the same workspace."""
        return replace(self, items=self.items.clone(), count=self.count.clone(), window=window)

    def max_items(self, batch: int, shared: bool = False, sparse: bool = False) -> int:
        """Bound on a batch's work items: one wave, SPREAD a sequence, and one that each sequence's rounding may add.

        What is left of a sequence after its shared prefix is short, and of a sparse batch many are none.
        """
        return self.wave + (1 if shared or sparse else SPREAD) * batch + batch

    @property
    def shared_wave(self) -> int:
        """Programs a KV head of the pass over shared prefixes: one a multiprocessor leaves room for the other pass."""
        return -(-self.wave // PROGRAMS_PER_CORE)

    def update(
        self,
        rows: torch.Tensor,
        context_lens: torch.Tensor,
        shared: SharedPrefixes[torch.Tensor] | None = None,
        sparse: bool = False,
    ) -> None:
        """Plan a batch on the device.

        rows, context_lens: [batch] int32, rows of the block tables and lengths
        shared: what the pass over shared prefixes sees of this batch, if there is one
        sparse: sequences of length 0 are none: nothing is written for them
        """
        assert shared is None or self.window is None
        batch = rows.shape[0]
        _plan_kernel[(batch,)](
            self.items,
            self.count,
            rows,
            context_lens,
            shared.hidden if shared else rows,
            shared.bases if shared else rows,
            shared.parts if shared else rows,
            batch,
            self.max_items(batch, shared is not None, sparse),
            2 * self.wave,
            MIN_SPLIT,
            self.capacity,
            GRAIN=self.grain,
            CHUNK=256,
            FIELDS=ITEM_FIELDS,
            WINDOW=self.window or 0,
            SHARED=shared is not None,
            SPARSE=sparse,
            num_warps=1,
        )
