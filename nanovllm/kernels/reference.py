"""The kernels in plain torch: what they are tested against, and the whole of the CPU engine's elementwise work.

Nothing here imports Triton. On a CPU every torch call costs microseconds, so each function is few calls.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.sampling_params import GREEDY_BELOW

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # its largest value
NOISE_SPAN = 26.0  # above the range of the noise, from -log(24 log 2) = -2.8 to 33 log 2 = 22.9, and roundings


@dataclass(frozen=True)
class DecodeInputs:
    """What a decode step needs of each sequence, one value each."""

    token_ids: torch.Tensor  # [batch] int64, the row's last token
    positions: torch.Tensor  # [batch] int64, where that token stands
    slots: torch.Tensor  # [batch] int32, where its KV goes
    rows: torch.Tensor  # [batch] int64
    temperatures: torch.Tensor  # [batch] float32
    seeds: torch.Tensor  # [batch] int64


def decode_inputs(
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    given: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    block_size: int,
) -> DecodeInputs:
    """Gather the inputs of a batch's tokens from the device's rows.

    rows, context_lens: [batch] int32; lengths include the token that is about to be computed
    given: [batch] int32, its id; negative: the last one of its row
    last_tokens: [num_rows] int64
    block_tables: [num_rows, max_blocks] int32
    temperatures: [num_rows] float32
    seeds: [num_rows] int64
    """
    index, positions = rows.long(), context_lens.long() - 1
    slots = block_tables[index, positions // block_size] * block_size + positions % block_size
    token_ids = torch.where(given < 0, last_tokens[index], given.long())
    return DecodeInputs(token_ids, positions, slots.int(), index, temperatures[index], seeds[index])


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    The normalised value is computed in float32 and, as in transformers, rounded to x's dtype before the weight, unless
    the weight is float32.

    x: [..., hidden]; weight: [hidden] of x's dtype or float32, None for all ones
    Returns a new tensor like x.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    if weight is not None and weight.dtype == torch.float32:
        return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
    out = F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)
    return out if weight is None else out.mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual, the sum rounded to their dtype; the sum overwrites `residual`.

    x, residual: [num_tokens, hidden]
    Returns (normalised, the sum), the second in residual's storage.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up with silu(g) = g / (1 + exp(-g)), silu rounded before the product, as in transformers.

    gate_up: [num_tokens, 2 * intermediate], gate first
    Returns [num_tokens, intermediate], new.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def soft_cap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) in place, each step rounded to x's dtype, as in transformers."""
    return x.div_(cap).tanh_().mul_(cap)


def norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_q_heads: int,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise q and k per head, rotate both (Su et al., 2021), write k and v into the paged cache.

    Rotation pairs dimension i with i + head_dim / 2 ("rotate half").

    qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], contiguous; its contents are lost
    positions: [num_tokens] int32 or int64, rows of cos_sin
    slots: [num_tokens] int32 or int64, block * block_size + offset in it
    cos_sin: [max_position, head_dim] float32, cosines in the first half, sines in the second
    q_weight, k_weight: [head_dim] of qkv's dtype or float32 (see `rms_norm`), both or neither; None: no norm
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    kv_scales: [2, num_kv_heads] float32 for caches in float8: what is stored is k and v divided by them, saturating
    Returns q [num_tokens, num_q_heads, head_dim], possibly a view of qkv or strided.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_rotated = num_q_heads + num_kv_heads
    heads = qkv.view(num_tokens, -1, head_dim)
    x = heads[:, :num_rotated]
    if q_weight is not None:
        assert k_weight is not None
        x = rms_norm(x.to(q_weight.dtype), None, eps)
        x[:, :num_q_heads].mul_(q_weight)
        x[:, num_q_heads:].mul_(k_weight)
        x = x.to(qkv.dtype)
    cos, sin = F.embedding(positions, cos_sin).view(num_tokens, 2, 1, -1).unbind(1)
    first, second = x.view(num_tokens, num_rotated, 2, -1).unbind(2)
    rotated = torch.empty((num_tokens, num_rotated, head_dim), dtype=cos_sin.dtype, device=qkv.device)
    low, high = rotated.view(num_tokens, num_rotated, 2, -1).unbind(2)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=high).addcmul_(first, sin)

    rotated = rotated.to(qkv.dtype)
    q, k, v = rotated[:, :num_q_heads], rotated[:, num_q_heads:], heads[:, num_rotated:]
    slots = slots.long()
    if kv_scales is not None:  # bytes: torch copies no float8 by index
        k, v = (to_fp8(x, s[:, None]).view(torch.uint8) for x, s in zip((k, v), kv_scales, strict=True))
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    k_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, k)
    v_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, v)
    return q


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale in float8 (e4m3), contiguous; what is beyond its range saturates, NaN stays."""
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit integers that scatters every input bit (lowbias32, C. Wellons, 2018); overwrites x, int32.

    Products wrap, and a mask takes the copies of the sign bit out of a shift.
    """
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int32 of each (seed, position), int64; conversion keeps the low half."""
    a = _mix((positions * 0x9E3779B9 + 1).to(torch.int32)).bitwise_xor_(seeds.to(torch.int32))
    a = _mix(a)
    return a, _mix((seeds >> 32).to(torch.int32).bitwise_xor_(a).bitwise_xor_(0x85EBCA6B - 2**32))


def _noise(a: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float32, of keys and token ids, int32, that broadcast.

    A hash of them as v in (0, 1); -log(1 - v) is exponential, and minus its log is Gumbel. 1 - v instead of v puts
    the fine steps of a float near 0 where the large noises are.
    """
    h = _mix(_mix(ids ^ a).add_(b))
    v = h.long().bitwise_and_(0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The noise that `gumbel_sample` adds, [batch, vocab_size] float32; seeds and positions [batch] int64."""
    a, b = _keys(seeds, positions)
    return _noise(a[:, None], b[:, None], torch.arange(vocab_size, dtype=torch.int32, device=seeds.device))


def gumbel_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Draw a token id a row from softmax(logits / temperature), as argmax of logits / temperature + Gumbel noise.

    The noise depends on (seed, position, token id) alone, so a draw does not depend on the rest of the batch.
    Ties go to the lowest id. A row with NaN gives some id in range.

    logits: [batch, columns], any float type and row stride
    temperatures: [batch] float32; below 1e-5 the row is greedy
    seeds: [batch] int64
    positions: [batch] int64, index of the drawn token in its sequence
    out: [batch] int64 to write to
    vocab_size: valid columns, the first ones; all by default
    Returns token ids [batch] int64.
    """
    logits = logits[:, :vocab_size]
    tokens = torch.argmax(logits, dim=-1) if out is None else torch.argmax(logits, dim=-1, out=out)
    drawn = [(row, t) for row, t in enumerate(temperatures.tolist()) if t >= GREEDY_BELOW]
    if drawn:
        a, b = _keys(seeds, positions)
        for row, temperature in drawn:
            tokens[row] = _draw(logits[row], temperature, a[row], b[row], tokens[row])
    return tokens


def gumbel_best(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_id: int,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gumbel_sample` among some token ids: of several such draws, the best score's is what a draw of all gives.

    logits: [batch, columns], of which the first `count` are those of the ids from `first_id` on
    temperatures, seeds, positions: as in `gumbel_sample`
    Returns (scores [batch] float32, comparable within a row; token ids [batch] int64).
    """
    logits = logits[:, :count]
    tokens = torch.argmax(logits, dim=-1)
    best = logits.gather(1, tokens[:, None])[:, 0].float()
    drawn = [(row, t) for row, t in enumerate(temperatures.tolist()) if t >= GREEDY_BELOW]
    if drawn:
        a, b = _keys(seeds, positions)
        for row, temperature in drawn:
            ids, scores = _scores(logits[row], temperature, a[row], b[row], tokens[row], first_id)
            if len(ids):
                best[row], at = scores.max(0)
                tokens[row] = ids[at]
    return best, tokens + first_id


def _draw(
    logits: torch.Tensor, temperature: float, a: torch.Tensor, b: torch.Tensor, top: torch.Tensor
) -> torch.Tensor:
    """Token id drawn from one row, logits [vocab_size]; `top` is their argmax."""
    ids, scores = _scores(logits, temperature, a, b, top, 0)
    return ids[scores.argmax()] if len(ids) else top  # none in a row with NaN


def _scores(
    logits: torch.Tensor, temperature: float, a: torch.Tensor, b: torch.Tensor, top: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(columns, their scores) of those that can win a row: noise is bounded, so ids far below the top one cannot."""
    columns = torch.nonzero(logits >= logits[top].float() - NOISE_SPAN * temperature).squeeze(1)
    ids = columns.to(torch.int32)
    if first_id:
        ids += first_id
    return columns, logits[columns].float().div_(temperature).add_(_noise(a, b, ids))
