"""What one of several ranks holds of a decoder, and what cannot be split."""

from dataclasses import replace

from nanovllm.config import MAX_RANKS
from nanovllm.models.decoder import DecoderSpec

EXPERT_MULTIPLE = 8  # columns of an expert's matrices: 16-byte rows are what hardware tile loads need


def rank_spec(spec: DecoderSpec, size: int) -> DecoderSpec:
    """The spec with the sizes that each of `size` ranks has; of vocabulary and hidden state it tells the whole.

    KV heads are repeated where they are fewer than the ranks.

    Raises:
        ValueError: what does not divide, by name, and the numbers of ranks that it allows.
    """
    if size == 1:
        return spec
    _check("num_attention_heads", spec.num_q_heads, size)
    kv_heads = spec.num_kv_heads
    if kv_heads % size and size % kv_heads:
        fitting = [n for n in range(1, MAX_RANKS + 1) if not (kv_heads % n and n % kv_heads)]
        _refuse("num_key_value_heads", kv_heads, size, fitting)
    if spec.moe is None or len(spec.moe.layers) < spec.num_layers:
        _check("intermediate_size", spec.intermediate_size, size)
    moe = spec.moe
    if moe is not None:
        _check("moe_intermediate_size", moe.intermediate_size, size, EXPERT_MULTIPLE)
        moe = replace(moe, intermediate_size=moe.intermediate_size // size)
    if spec.vocab_size < size:
        raise ValueError(f"vocab_size {spec.vocab_size} is less than tensor_parallel_size {size}")
    return replace(
        spec,
        num_q_heads=spec.num_q_heads // size,
        num_kv_heads=max(kv_heads // size, 1),
        total_kv_heads=kv_heads,
        intermediate_size=spec.intermediate_size // size,
        moe=moe,
    )


def _check(name: str, value: int, size: int, multiple: int = 1) -> None:
    if value % (size * multiple):
        fitting = [n for n in range(1, MAX_RANKS + 1) if value % (n * multiple) == 0]
        _refuse(name, value, size, fitting, f" into multiples of {multiple}" if multiple > 1 else "")


def _refuse(name: str, value: int, size: int, fitting: list[int], into: str = "") -> None:
    raise ValueError(
        f"tensor_parallel_size {size} cannot split the model's {name} {value}{into}; "
        f"sizes that can: {', '.join(map(str, fitting))}"
    )
