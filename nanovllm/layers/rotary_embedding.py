"""Rotary position embedding: the table of cosines and sines (Su et al., 2021) and its scaled variants."""

import math
from typing import Any

import torch

SCALED_TYPES = ("linear", "llama3", "yarn")


def rope_settings(hf_config: Any) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the rest, from transformers 5 (`rope_parameters`) or 4 (`rope_scaling`) configs."""
    rope = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"rope settings by layer type are not supported: {rope}")
    settings = dict(rope)
    settings["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta")
    settings["rope_theta"] = getattr(hf_config, "rope_theta", 10000.0) if theta is None else theta
    partial = rope.get("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", None))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {partial} is not supported, only 1")
    return settings


def inverse_frequencies(hf_config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angles per position [head_dim / 2] (float32) and the factor on cos and sin.

    Raises:
        ValueError: for a scaling that is not implemented.
    """
    settings = rope_settings(hf_config)
    frequencies, factor = _scaled_frequencies(hf_config, settings, head_dim)
    if not (frequencies.isfinite().all() and math.isfinite(factor)):
        raise ValueError(f"rope settings that give infinite angles: {settings}")
    return frequencies, factor


def _scaled_frequencies(hf_config: Any, settings: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    kind = settings["rope_type"]
    if not isinstance(settings["rope_theta"], (int, float)) or settings["rope_theta"] <= 0:
        raise ValueError(f"rope_theta must be a positive number, got {settings['rope_theta']!r}")
    if kind in ("default", "linear"):
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / settings["rope_theta"] ** exponents / settings.get("factor", 1.0), 1.0
    if kind not in SCALED_TYPES:
        raise ValueError(f"rope scaling {kind!r} is not supported; supported are default, {', '.join(SCALED_TYPES)}")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ValueError(f"rope settings {settings} cannot be used: {error!r}") from error
    return frequencies.float(), float(factor)


def build_cos_sin(hf_config: Any, head_dim: int, max_len: int, device: torch.device) -> torch.Tensor:
    """Table [max_len, head_dim] float32: cosines of each position in the first half, sines in the second."""
    frequencies, factor = inverse_frequencies(hf_config, head_dim)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies[None, :]
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * factor).to(device)
