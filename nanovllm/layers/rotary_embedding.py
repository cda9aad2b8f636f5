"""Rotary position embedding: the table of cosines and sines (Su et al., 2021) and its scaled variants."""

import math
from dataclasses import dataclass
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


def limit_note(settings: dict[str, Any]) -> str:
    """Why sequences end at the config's `max_position_embeddings`, to end an error message with."""
    if settings["rope_type"] == "dynamic":
        return " (beyond it, the angles of rope type 'dynamic' change with each sequence's length)"
    return ""


@dataclass(frozen=True)
class LongRope:
    """A second table of angles behind the first, for sequences that may grow longer than `window` positions.

    Keys in the cache are rotated already, and stay as they are when a sequence grows: which table it has is decided by
    the length that it may reach, and it shares no cached prefix with sequences that have the other.
    """

    window: int
    offset: int  # where the second table begins

    def offset_for(self, max_len: int) -> int:
        """What a sequence that ends at `max_len` tokens adds to positions; its last token is never computed."""
        return self.offset if max_len - 1 > self.window else 0


def long_rope(settings: dict[str, Any], max_len: int) -> LongRope | None:
    """None: all sequences of up to `max_len` tokens rotate by the same angles."""
    if settings["rope_type"] != "longrope" or not isinstance(settings[ORIGINAL], int):
        return None
    return LongRope(settings[ORIGINAL], max_len) if max_len - 1 > settings[ORIGINAL] else None


def inverse_frequencies(
    hf_config: Any, settings: dict[str, Any], head_dim: int, length: int | None = None
) -> tuple[torch.Tensor, float]:
    """Angles per position [rotary_dim / 2] (float32) and the factor on cos and sin.

    Args:
        length: of the sequences, where rope type 'longrope' depends on it; None: within the original window.

    Raises:
        ValueError: for a scaling that is not implemented, or settings that cannot be used.
    """
    frequencies, factor = _scaled_frequencies(hf_config, settings, head_dim, length)
    if not (frequencies.isfinite().all() and math.isfinite(factor)):
        raise ValueError(f"rope settings that give infinite angles: {settings}")
    return frequencies, factor


def _scaled_frequencies(
    hf_config: Any, settings: dict[str, Any], head_dim: int, length: int | None
) -> tuple[torch.Tensor, float]:
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
        which = length if kind == "longrope" else None
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), which)
        frequencies, factor = frequencies.float(), float(factor)
        if kind == "dynamic":
            at_the_end, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), config.max_position_embeddings)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"rope settings {settings} cannot be used: {error!r}") from error
    if kind == "dynamic" and not torch.equal(frequencies, at_the_end):
        raise ValueError(f"rope settings {settings} give angles that depend on the sequence's length: not supported")
    return frequencies, factor


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
    hf_config: Any,
    settings: dict[str, Any],
    head_dim: int,
    max_len: int,
    device: torch.device,
    long: LongRope | None = None,
) -> torch.Tensor:
    """Table [max_len, head_dim] float32: cosines of each position in the first half, sines in the second.

    Of a partial rotation, the rest of each half turns by nothing: see `head_order`. With `long`, the second table of
    as many rows follows.
    """
    tables = [_cos_sin(*inverse_frequencies(hf_config, settings, head_dim), head_dim, max_len)]
    if long is not None:
        assert long.offset == max_len
        frequencies, factor = inverse_frequencies(hf_config, settings, head_dim, long.window + 1)
        tables.append(_cos_sin(frequencies, factor, head_dim, max_len))
    return torch.cat(tables).to(device)


def _cos_sin(frequencies: torch.Tensor, factor: float, head_dim: int, max_len: int) -> torch.Tensor:
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies[None, :]
    still = (0, head_dim // 2 - len(frequencies))
    cos, sin = F.pad(angles.cos() * factor, still, value=1.0), F.pad(angles.sin() * factor, still)
    return torch.cat([cos, sin], dim=-1)


def head_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Order [head_dim] of a head's dimensions in which i turns with i + head_dim / 2 although not all are rotated.

    In a checkpoint, i turns with i + rotary_dim / 2 and the last dimensions stay. Scores are sums over dimensions:
    queries and keys may have them in any order, as long as it is the same.
    """
    turning, still = torch.arange(rotary_dim).view(2, -1), torch.arange(rotary_dim, head_dim).view(2, -1)
    return torch.cat([turning, still], dim=1).flatten()
