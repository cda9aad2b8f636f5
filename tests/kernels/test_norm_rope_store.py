"""Norm, rotary embedding and KV write: the kernel against its reference, the reference against transformers."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from nanovllm.kernels import reference
from nanovllm.kernels.norm_rope_store import norm_rope_store
from nanovllm.kernels.reference import FP8
from tests.cases import in_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of the largest value; the interpreter cuts bfloat16 off instead of rounding it.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2 if DEVICE == "cuda" else 4e-2}
EPS, NUM_BLOCKS, BLOCK_SIZE, MAX_POSITION = 1e-6, 7, 16, 500


def make_case(num_tokens, num_q_heads, num_kv_heads, head_dim, dtype, norm, int_type=torch.int64):
    """Arguments of `norm_rope_store`: scattered slots in NaN-filled caches."""
    rows = num_q_heads + 2 * num_kv_heads
    qkv = torch.randn((num_tokens, rows * head_dim), device=DEVICE).to(dtype)
    positions = torch.randint(0, MAX_POSITION, (num_tokens,), device=DEVICE).to(int_type)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device=DEVICE)[:num_tokens].to(torch.int32)
    exponents = torch.arange(0, head_dim, 2, device=DEVICE) / head_dim
    angles = torch.arange(MAX_POSITION, device=DEVICE)[:, None] / 10000.0**exponents
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    weights = [torch.randn(head_dim, device=DEVICE).to(dtype) if norm else None for _ in range(2)]
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    return [qkv, positions, slots, cos_sin, *weights, EPS, k_cache, v_cache, num_q_heads]


def copy_of(case):
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in case]


def expected_by_transformers(case):
    """(q, k, v, k_cache, v_cache) from transformers' own modules, in the dtype of the case."""
    qkv, positions, slots, cos_sin, q_weight, k_weight, eps, k_cache, v_cache, num_q_heads = copy_of(case)
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_weight is not None:
        norms = []
        for weight in (q_weight, k_weight):
            norm = LlamaRMSNorm(head_dim, eps=eps).to(DEVICE, qkv.dtype)
            norm.weight.data.copy_(weight)
            norms.append(norm)
        q, k = norms[0](q).detach(), norms[1](k).detach()
    cos, sin = cos_sin[positions.long()].chunk(2, dim=1)
    cos, sin = torch.cat([cos, cos], dim=1).to(qkv.dtype), torch.cat([sin, sin], dim=1).to(qkv.dtype)
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    for token, slot in enumerate(slots.tolist()):
        k_cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = k[token]
        v_cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = v[token]
    return q, k_cache, v_cache


def check(function, case, expected, tolerance):
    case = copy_of(case)
    q = function(*case)
    assert q.dtype == case[0].dtype
    for actual, wanted in zip((q, case[7], case[8]), expected, strict=True):
        assert actual.shape == wanted.shape
        actual, wanted = actual.float(), wanted.float()
        atol = (
            tolerance * wanted.nan_to_num().abs().max().item()
        )  # a rotation may cancel: errors are those of its terms
        torch.testing.assert_close(actual, wanted, rtol=0, atol=atol, equal_nan=True)
    assert torch.equal(case[8].nan_to_num(7.0), expected[2].nan_to_num(7.0))  # v is moved, not computed


@pytest.mark.parametrize(
    ("dtype", "norm", "num_q_heads", "num_kv_heads", "head_dim"),
    in_pairs(DTYPES, [True, False], [(16, 8, 128), (9, 3, 64), (12, 4, 80), (3, 1, 96), (2, 2, 256)]),
)
def test_kernel_and_reference(num_q_heads, num_kv_heads, head_dim, norm, dtype):
    case = make_case(11, num_q_heads, num_kv_heads, head_dim, dtype, norm)
    check(reference.norm_rope_store, case, expected_by_transformers(case), TOLERANCE[dtype])
    wanted = copy_of(case)
    q = reference.norm_rope_store(*wanted)
    check(norm_rope_store, case, (q, wanted[7], wanted[8]), TOLERANCE[dtype])


@pytest.mark.parametrize("function", [norm_rope_store, reference.norm_rope_store])
@pytest.mark.parametrize("num_tokens", [1, 2, 64])
def test_token_counts_and_int32_positions(function, num_tokens):
    case = make_case(num_tokens, 4, 2, 64, torch.float32, True, torch.int32)
    check(function, case, expected_by_transformers(case), 1e-6)


@pytest.mark.parametrize("function", [norm_rope_store, reference.norm_rope_store])
def test_inputs_may_be_unaligned_slices(function):
    case = make_case(5, 4, 2, 64, torch.float32, False)
    expected = expected_by_transformers(case)
    for i in (1, 2):
        case[i] = torch.cat([case[i][:1], case[i]])[1:]
    check(function, case, expected, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_norm_weights(dtype):
    """They are not rounded, nor is what they multiply: the same as weights and norm in float32, rounded once."""
    case = make_case(5, 4, 2, 64, dtype, True)
    case[4], case[5] = torch.randn(2, 64, device=DEVICE)
    normed = copy_of(case)
    heads = normed[0].view(5, -1, 64)
    for some, weight in ((heads[:, :4], case[4]), (heads[:, 4:6], case[5])):
        some.copy_(torch.nn.functional.rms_norm(some.float(), (64,), weight, EPS))
    normed[4] = normed[5] = None
    expected = expected_by_transformers(normed)
    for function in (norm_rope_store, reference.norm_rope_store):
        check(function, case, expected, TOLERANCE[dtype])


def make_float8_case(num_tokens, num_q_heads, num_kv_heads, head_dim, dtype, norm):
    case = make_case(num_tokens, num_q_heads, num_kv_heads, head_dim, dtype, norm)
    case[7], case[8] = case[7].to(FP8), case[8].to(FP8)
    scales = torch.exp2(torch.arange(2 * num_kv_heads, device=DEVICE).float() - num_kv_heads)
    return [*case, scales.view(2, num_kv_heads)]


@pytest.mark.parametrize(
    ("dtype", "norm", "num_q_heads", "num_kv_heads", "head_dim"),
    in_pairs(DTYPES, [True, False], [(16, 8, 128), (9, 3, 64), (12, 4, 80)]),
)
def test_float8_caches_hold_what_the_others_would_divided_by_the_scales(
    num_q_heads, num_kv_heads, head_dim, norm, dtype
):
    case = make_float8_case(11, num_q_heads, num_kv_heads, head_dim, dtype, norm)
    wide = copy_of(case)[:10]
    wide[7], wide[8] = (torch.zeros(case[7].shape, dtype=dtype, device=DEVICE) for _ in range(2))
    q = reference.norm_rope_store(*wide).clone()
    plain, kernel = copy_of(case), copy_of(case)
    torch.testing.assert_close(reference.norm_rope_store(*plain), q, rtol=0, atol=0)
    atol = TOLERANCE[dtype] * q.abs().max().item()
    torch.testing.assert_close(norm_rope_store(*kernel).float(), q.float(), rtol=0, atol=atol)
    blocks, offsets = case[2].long() // BLOCK_SIZE, case[2].long() % BLOCK_SIZE
    for cache, scales in zip((7, 8), case[10], strict=True):
        scaled = wide[cache][blocks, offsets].float() / scales[:, None]
        expected = scaled.clamp(-448, 448).to(FP8).float()  # not every version of torch saturates
        for stored in (plain, kernel):
            actual = stored[cache].float()[blocks, offsets]
            if stored is plain or cache == 8:  # values are moved and rounded, nothing else
                assert torch.equal(actual, expected)
            else:  # a key that differs in its last bit may round to the neighbour
                assert (actual != expected).float().mean() < (0.002 if dtype == torch.float32 else 0.15)
                torch.testing.assert_close(actual, expected, rtol=0.13, atol=expected.abs().max().item() * 0.05)
    for stored in (plain, kernel):
        written = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool, device=DEVICE)
        written[blocks, offsets] = True
        assert stored[7].float()[~written].isnan().all()


@pytest.mark.parametrize("function", [norm_rope_store, reference.norm_rope_store])
def test_float8_caches_saturate_and_keep_nan(function):
    case = make_float8_case(4, 2, 1, 64, torch.float32, False)
    case[1].zero_()  # nothing is rotated
    case[10] = torch.tensor([[2.0], [0.5]], device=DEVICE)
    heads = case[0].view(4, 4, 64)
    heads[:, 2:, :5] = torch.tensor([1e6, -1e6, 700.0, float("nan"), 1e-9], device=DEVICE)
    function(*case)
    blocks, offsets = case[2].long() // BLOCK_SIZE, case[2].long() % BLOCK_SIZE
    k, v = (case[i].float()[blocks, offsets, 0, :5] for i in (7, 8))
    nan = float("nan")
    torch.testing.assert_close(k, torch.tensor([[448.0, -448, 352, nan, 0]] * 4, device=DEVICE), equal_nan=True)
    torch.testing.assert_close(v, torch.tensor([[448.0, -448, 448, nan, 0]] * 4, device=DEVICE), equal_nan=True)


@pytest.mark.gpu
def test_slots_beyond_32_bit_offsets():
    case = make_case(2, 2, 1, 64, torch.bfloat16, False)
    expected = expected_by_transformers(case)
    num_blocks = 2**31 // (64 * BLOCK_SIZE) + 1
    case[7], case[8] = torch.zeros((2, num_blocks, BLOCK_SIZE, 1, 64), dtype=torch.bfloat16, device=DEVICE)
    low = case[2][:1].item()
    case[2][0] = num_blocks * BLOCK_SIZE - 1
    norm_rope_store(*case)
    assert torch.equal(case[8][-1, -1], expected[2][low // BLOCK_SIZE, low % BLOCK_SIZE])
    assert torch.count_nonzero(case[8]) == 128
