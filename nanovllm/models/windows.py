"""Which layers see a window of the last keys only, from what the families' configs say of it."""

from typing import Any

KINDS = ("full_attention", "sliding_attention")


def layer_windows(hf_config: Any, enabled: bool = True) -> tuple[int | None, ...]:
    """The window of each layer, in keys, the token's own included; None: all keys.

    Args:
        hf_config: with `sliding_window`, and `layer_types` where layers differ.
        enabled: whether the config means its `sliding_window`.

    Raises:
        ValueError: a kind of attention that is not implemented, or a window that is none.
    """
    num_layers = hf_config.num_hidden_layers
    window = getattr(hf_config, "sliding_window", None) if enabled else None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window in the model's config must be 1 or more, got {window!r}")
    kinds = getattr(hf_config, "layer_types", None)
    if kinds is None:
        return (window,) * num_layers
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or len(kinds) != num_layers:
        raise ValueError(f"layer_types in the model's config must be {num_layers} of {', '.join(KINDS)}, got {kinds}")
    if window is None and enabled and "sliding_attention" in kinds:
        raise ValueError("layer_types in the model's config has sliding_attention, but sliding_window is missing")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
