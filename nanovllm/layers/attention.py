"""Attention over paged KV, behind one interface. Here: the interface and the plain-torch backend.

Writing KV is part of `Ops.norm_rope_store`; a backend reads K and V from the cache only, so that a first
prefill, a later chunk and a prefix hit are one path.
"""

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanovllm.kernels.reference import FP8, soft_cap_
from nanovllm.kernels.shared_prefixes import SharedPrefixes
from nanovllm.layers.graph_batch import GraphBatch

if TYPE_CHECKING:
    from nanovllm.engine.step import Step, StepInput

QUERY_TILE = 512  # queries of one prompt attended at once: bounds the mask's memory
CAPPED_TILE = 64  # the same with a soft cap, when the scores of all heads are in memory, too
MAX_PADDING = 2.0  # decodes share a padded batch while the longest is at most so many times the shortest


class AttentionBackend(Protocol):
    """What the model needs from attention."""

    name: str
    block_multiple: int  # the block size must be a multiple of it
    graphs: bool  # `plan_graph` works without the host, so that a CUDA graph can hold it
    graph_prompts: bool  # and takes prompts, too
    # Where a step's `StepInput.shared` goes before it is planned. None: the backend has no pass over shared prefixes.
    shared: SharedPrefixes[torch.Tensor] | None

    def plan(self, inputs: "StepInput", rows: torch.Tensor, context_lens: torch.Tensor, step: "Step") -> object:
        """Work out, once a step, what all layers need; the result is handed back as `step.plan`.

        Args:
            inputs: the step on the host.
            rows, context_lens: [S] int32 on the device.
            step: without a plan yet.
        """
        ...

    def plan_graph(self, batch: GraphBatch) -> object:
        """The same for a step that only the device knows."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        step: "Step",
        scale: float,
        window: int | None = None,
        kv_scales: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention over the cache.

        Args:
            q: [T, num_q_heads, head_dim].
            k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim].
            step: says which tokens belong to which sequence.
            scale: on the scores.
            window: keys that a token sees, itself included (one of those the backend was made for); None: all.
            kv_scales: [2, num_kv_heads] float32, of a cache in float8: of keys, then of values.
            softcap: scaled scores become softcap * tanh(score / softcap), before any mask; None: they stay.

        Returns:
            [T, num_q_heads, head_dim].
        """
        ...


@dataclass
class DecodeGroup:
    """Decodes of similar length, padded to one; K and V are gathered into buffers that all layers reuse."""

    tokens: torch.Tensor  # [n] which tokens of the step these are
    blocks: torch.Tensor  # [n * max_blocks] visible blocks of each, one after the other
    mask: torch.Tensor  # [n, 1, 1, max_blocks * block_size] added to the scores: 0 or -inf
    covers_step: bool  # the group is the whole step, in order
    buffers: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class Prompt:
    """A sequence with several tokens in this step."""

    first: int  # its first token in the step
    num_tokens: int
    blocks: torch.Tensor  # [blocks of the context that some token of the step sees]
    context_len: int  # from the start of the first of these blocks
    window: int | None


@dataclass(frozen=True)
class TorchPlan:
    decodes: list[DecodeGroup]
    prompts: list[Prompt]


class TorchAttention:
    """Gathers the visible blocks, then calls `scaled_dot_product_attention`: the CPU's path and the reference.

    That function knows no soft cap; where one is asked for, scores are computed one tile of queries at a time.

    Args:
        windows: what layers will ask for.
        dtype: of queries; None: the cache's.
    """

    name = "torch"
    block_multiple = 16
    graphs = False
    graph_prompts = False
    shared: SharedPrefixes[torch.Tensor] | None = None

    def __init__(self, windows: Collection[int | None] = (None,), dtype: torch.dtype | None = None):
        self._windows = windows
        self._dtype = dtype

    def plan(
        self, inputs: "StepInput", rows: torch.Tensor, context_lens: torch.Tensor, step: "Step"
    ) -> dict[int | None, TorchPlan]:
        dtype = self._dtype or step.kv_cache.dtype
        return {window: _plan(inputs, step, window, dtype) for window in self._windows}

    def plan_graph(self, batch: GraphBatch) -> object:
        raise NotImplementedError("the torch backend needs lengths on the host")

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        step: "Step",
        scale: float,
        window: int | None = None,
        kv_scales: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        assert isinstance(step.plan, dict)
        if kv_scales is None:
            return self._attend_step(q, k_cache, v_cache, step.plan[window], scale, softcap)
        group = q.shape[1] // k_cache.shape[2]
        k_scales, v_scales = kv_scales.to(q.dtype).repeat_interleave(group, dim=1)[:, :, None]
        return self._attend_step(q * k_scales, k_cache, v_cache, step.plan[window], scale, softcap).mul_(v_scales)

    def _attend_step(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: TorchPlan,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        # On a GPU this backend is the reference: only the math kernel computes float32 in float32 for every mask.
        with sdpa_kernel(SDPBackend.MATH) if q.is_cuda else nullcontext():
            return self._attend(q, k_cache, v_cache, plan, scale, softcap)

    def _attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: TorchPlan,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        if len(plan.decodes) == 1 and plan.decodes[0].covers_step:
            return _attend_decodes(q, k_cache, v_cache, plan.decodes[0], scale, softcap)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in plan.decodes:
            out[group.tokens] = _attend_decodes(q[group.tokens], k_cache, v_cache, group, scale, softcap)
        for prompt in plan.prompts:
            tokens = slice(prompt.first, prompt.first + prompt.num_tokens)
            _attend_prompt(q[tokens], k_cache, v_cache, prompt, scale, softcap, out[tokens])
        return out


def _plan(inputs: "StepInput", step: "Step", window: int | None, dtype: torch.dtype) -> TorchPlan:
    """Sort a step's sequences, each with the blocks that its first token in this step sees and the later ones."""
    block_size = step.kv_cache.shape[3]
    first_blocks = np.zeros_like(inputs.starts)
    if window is not None:
        first_blocks = np.maximum(inputs.starts + 1 - window, 0) // block_size
    num_blocks = -(-(inputs.starts + inputs.lengths) // block_size) - first_blocks
    firsts = np.cumsum(inputs.lengths) - inputs.lengths
    prompts = []
    for i in np.flatnonzero(inputs.lengths > 1):
        begin, length = int(first_blocks[i]), int(inputs.lengths[i])
        blocks = step.block_tables[int(inputs.rows[i]), begin : begin + int(num_blocks[i])].long()
        context_len = int(inputs.starts[i]) + length - begin * block_size
        prompts.append(Prompt(int(firsts[i]), length, blocks, context_len, window))
    decodes = np.flatnonzero(inputs.lengths == 1)
    decodes = decodes[np.argsort(num_blocks[decodes], kind="stable")]
    groups = []
    while len(decodes):
        n = int(np.searchsorted(num_blocks[decodes], MAX_PADDING * num_blocks[decodes[0]], side="right"))
        groups.append(_decode_group(inputs, step, np.sort(decodes[:n]), firsts, first_blocks, window, dtype))
        decodes = decodes[n:]
    return TorchPlan(groups, prompts)


def _decode_group(
    inputs: "StepInput",
    step: "Step",
    chosen: np.ndarray,
    firsts: np.ndarray,
    first_blocks: np.ndarray,
    window: int | None,
    dtype: torch.dtype,
) -> DecodeGroup:
    device, block_size = step.block_tables.device, step.kv_cache.shape[3]
    begins = first_blocks[chosen] * block_size
    host_lens = inputs.starts[chosen] + 1 - begins  # counted from the first visible block
    lens = torch.from_numpy(host_lens).to(device)[:, None]
    max_blocks = -(-int(host_lens.max()) // block_size)
    rows = torch.from_numpy(inputs.rows[chosen]).to(device).long()[:, None]
    columns = torch.arange(max_blocks, device=device)
    visible = torch.from_numpy(first_blocks[chosen]).to(device)[:, None] + columns
    tables = step.block_tables[rows, visible.clamp_(max=step.block_tables.shape[1] - 1)].long()
    tables.masked_fill_(columns * block_size >= lens, 0)  # an unused column may hold anything
    positions = torch.arange(max_blocks * block_size, device=device)
    mask = torch.zeros(len(chosen), max_blocks * block_size, dtype=dtype, device=device)
    mask.masked_fill_(positions >= lens, float("-inf"))
    if window is not None:
        mask.masked_fill_(positions < lens - window, float("-inf"))
    covers = len(chosen) == len(inputs.token_ids)
    tokens = torch.from_numpy(firsts[chosen]).to(device).long()
    return DecodeGroup(tokens, tables.flatten(), mask[:, None, None, :], covers)


def _attend_decodes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: DecodeGroup,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    n, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    if group.buffers is None:
        shape = (group.blocks.numel(), *k_cache.shape[1:])
        group.buffers = (k_cache.new_empty(shape), v_cache.new_empty(shape))
    k, v = group.buffers
    torch.index_select(_movable(k_cache), 0, group.blocks, out=_movable(k))
    torch.index_select(_movable(v_cache), 0, group.blocks, out=_movable(v))
    k = k.to(q.dtype).view(n, -1, num_kv_heads, head_dim).transpose(1, 2)
    v = v.to(q.dtype).view(n, -1, num_kv_heads, head_dim).transpose(1, 2)
    # The query heads that share a KV head stand where a prompt's queries would: K and V are read once for all.
    q = q.reshape(n, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    out = _weighted_values(q, k, v, group.mask, scale, softcap)
    return out.reshape(n, num_q_heads, head_dim)


def _movable(cache: torch.Tensor) -> torch.Tensor:
    """float8 as bytes: not every torch operation moves it."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def _visible(cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The slots of some blocks, [num_slots, num_kv_heads, head_dim]."""
    return _movable(cache)[blocks].view(cache.dtype).to(dtype).flatten(0, 1)


def _weighted_values(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attention of [..., heads, queries, head_dim]; `mask` is added to the scores, None: as many keys, causal."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    scores = soft_cap_((q @ k.transpose(-1, -2)).mul_(scale), softcap)
    if mask is None:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    else:
        scores += mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def _attend_prompt(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prompt: Prompt,
    scale: float,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_q_heads // num_kv_heads
    k, v = (
        _visible(cache, prompt.blocks, q.dtype)[: prompt.context_len].transpose(0, 1).unsqueeze(1)
        for cache in (k_cache, v_cache)
    )  # [num_kv_heads, 1, context_len, head_dim]
    q = q.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    offset = prompt.context_len - num_tokens
    step = QUERY_TILE if softcap is None else CAPPED_TILE
    for first in range(0, num_tokens, step):
        last = min(first + step, num_tokens)
        begin, end = 0 if prompt.window is None else max(offset + first + 1 - prompt.window, 0), offset + last
        keys = (k[:, :, begin:end].expand(-1, group, -1, -1), v[:, :, begin:end].expand(-1, group, -1, -1))
        mask = _tile_mask(q, last - first, end - begin, prompt.window)
        tile = _weighted_values(q[:, :, first:last], *keys, mask, scale, softcap)
        out[first:last] = tile.permute(2, 0, 1, 3).reshape(last - first, num_q_heads, head_dim)


def _tile_mask(like: torch.Tensor, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor | None:
    """[num_queries, num_keys], 0 or -inf, for queries at the last of the keys' positions; None: causal says it all."""
    windowed = window is not None and num_keys > window
    if num_keys == num_queries and not windowed:
        return None
    offset = num_keys - num_queries
    mask = like.new_zeros(num_queries, num_keys)
    future = torch.ones(num_queries, num_queries, dtype=torch.bool, device=like.device).triu(1)
    mask[:, offset:].masked_fill_(future, float("-inf"))
    if windowed:
        assert window is not None
        past = torch.ones_like(mask, dtype=torch.bool).tril(offset - window)
        mask.masked_fill_(past, float("-inf"))
    return mask
