"""Rotary position embedding: the table of cosines and sines (Su et al., 2021) and its scaled variants."""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

SCALED_TYPES = ("linear", "dynamic", "llama3", "yarn", "longrope")
ORIGINAL = "original_max_position_embeddings"


def rope_settings(hf_config: Any, kind: str | None = None) -> dict[str, Any]:
    """`rope_type`, `rope_theta`, `partial_rotary_factor` and the rest of one rotation, as a dict of their own.

    Args:
        hf_config: with `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4).
        kind: an entry of `layer_types`, in families whose kinds of layers rotate differently.

    Raises:
        ValueError: rotations by kind of layer where the family has one, or none for this kind.
    """
    rope = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    theta = getattr(hf_config, "rope_theta", 10000.0)
    if any(isinstance(value, dict) for value in rope.values()):
        if kind is None:
            raise ValueError(f"rope settings by layer type are not supported: {rope}")
        if not isinstance(rope.get(kind), dict):
            raise ValueError(f"rope settings of {kind} layers must be a dict, got {rope.get(kind)!r}")
        rope = rope[kind]
    elif kind == "sliding_attention":  # in transformers 4 the scaling is the other layers'
        rope, theta = {}, getattr(hf_config, "rope_local_base_freq", theta)
    settings = dict(rope)
    settings["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    settings["rope_theta"] = theta if rope.get("rope_theta") is None else rope["rope_theta"]
    settings.setdefault("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", None))
    if settings["partial_rotary_factor"] is None:
        settings["partial_rotary_factor"] = 1.0
    if settings["rope_type"] in ("llama3", "yarn", "longrope"):
        own = getattr(hf_config, ORIGINAL, None)
        settings[ORIGINAL] = own or settings.get(ORIGINAL) or getattr(hf_config, "max_position_embeddings", None)
    return settings


def rotary_dim(settings: dict[str, Any], head_dim: int) -> int:
    """Dimensions of a head that are rotated, the first ones.

    Raises:
        ValueError: a `partial_rotary_factor` that gives no even number of them.
    """
    factor = settings["partial_rotary_factor"]
    dim = int(head_dim * factor) if isinstance(factor, (int, float)) and 0 < factor <= 1 else 0
    if dim < 2 or dim % 2:
        raise ValueError(f"partial_rotary_factor {factor!r} does not rotate an even number of {head_dim} dimensions")
    return dim


def rope_limit(settings: dict[str, Any], max_positions: int) -> tuple[int, str]:
    """Longest sequence whose tokens one table can rotate, and what limits it, for an error message.

    Keys in the cache are rotated already and serve every sequence with the same prefix. Where a longer sequence
    rotates all its tokens differently from a shorter one, the length ends at which that happens.
    """
    kind = settings["rope_type"]
    if kind == "longrope" and isinstance(settings[ORIGINAL], int) and settings[ORIGINAL] < max_positions:
        reason = f"of {max_positions} in the config: beyond {ORIGINAL}, rope type 'longrope' takes all tokens of the"
        return settings[ORIGINAL], f" ({reason} sequence to other angles, which is not supported)"
    if kind == "dynamic":
        return max_positions, " (beyond it, the angles of rope type 'dynamic' change with each sequence's length)"
    return max_positions, ""


def inverse_frequencies(hf_config: Any, settings: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """Angles per position [rotary_dim / 2] (float32) and the factor on cos and sin.

    Raises:
        ValueError: for a scaling that is not implemented, or settings that cannot be used.
    """
    frequencies, factor = _scaled_frequencies(hf_config, settings, head_dim)
    if not (frequencies.isfinite().all() and math.isfinite(factor)):
        raise ValueError(f"rope settings that give infinite angles: {settings}")
    return frequencies, factor


def _scaled_frequencies(hf_config: Any, settings: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    kind = settings["rope_type"]
    if not isinstance(settings["rope_theta"], (int, float)) or settings["rope_theta"] <= 0:
        raise ValueError(f"rope_theta must be a positive number, got {settings['rope_theta']!r}")
    if kind == "default":
        dim = rotary_dim(settings, head_dim)
        return 1.0 / settings["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim), 1.0
    if kind not in SCALED_TYPES:
        raise ValueError(f"rope scaling {kind!r} is not supported; supported are default, {', '.join(SCALED_TYPES)}")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = _flat_config(hf_config, settings, head_dim)
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        if kind == "dynamic":
            at_the_end, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), config.max_position_embeddings)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"rope settings {settings} cannot be used: {error!r}") from error
    if kind == "dynamic" and not torch.equal(frequencies, at_the_end):
        raise ValueError(f"rope settings {settings} give angles that depend on the sequence's length: not supported")
    return frequencies.float(), float(factor)


def _flat_config(hf_config: Any, settings: dict[str, Any], head_dim: int) -> SimpleNamespace:
    """What transformers' rope functions read, in the forms of 4 and of 5, with these settings for all layers."""
    config = SimpleNamespace(
        rope_parameters=settings,
        rope_scaling=settings,
        rope_theta=settings["rope_theta"],
        partial_rotary_factor=settings["partial_rotary_factor"],
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=getattr(hf_config, "max_position_embeddings", None),
        standardize_rope_params=lambda: None,
    )
    if getattr(hf_config, ORIGINAL, None) is not None:  # transformers 4 asks whether it is there
        config.original_max_position_embeddings = settings.get(ORIGINAL)
    return config


def build_cos_sin(
    hf_config: Any, settings: dict[str, Any], head_dim: int, max_len: int, device: torch.device
) -> torch.Tensor:
    """Table [max_len, head_dim] float32: cosines of each position in the first half, sines in the second.

    Of a partial rotation, the rest of each half turns by nothing: see `head_order`.
    """
    frequencies, factor = inverse_frequencies(hf_config, settings, head_dim)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies[None, :]
    still = (0, head_dim // 2 - len(frequencies))
    cos, sin = F.pad(angles.cos() * factor, still, value=1.0), F.pad(angles.sin() * factor, still)
    return torch.cat([cos, sin], dim=-1).to(device)


def head_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Order [head_dim] of a head's dimensions in which i turns with i + head_dim / 2 although not all are rotated.

    In a checkpoint, i turns with i + rotary_dim / 2 and the last dimensions stay. Scores are sums over dimensions:
    queries and keys may have them in any order, as long as it is the same.
    """
    turning, still = torch.arange(rotary_dim).view(2, -1), torch.arange(rotary_dim, head_dim).view(2, -1)
    return torch.cat([turning, still], dim=1).flatten()
