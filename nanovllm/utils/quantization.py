"""Which layers of a model are in float8: what an option asks for, or what a checkpoint's config says of its tensors."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from nanovllm.layers.embed_head import LMHead
from nanovllm.layers.fp8 import Fp8Form
from nanovllm.layers.linear import Linear

FLOAT8 = {"num_bits": 8, "type": "float"}


@dataclass(frozen=True)
class Quantization:
    """float8 linear layers."""

    form: Fp8Form | None = None  # how the checkpoint stores them; None: it does not, they are quantised once loaded
    ignored: tuple[str, ...] = ()  # layers that stay as they are

    def ignores(self, layer: str) -> bool:
        """Whether the list names the layer: its path, the end of it, a module around it, or "re:" and an expression."""
        for entry in self.ignored:
            if entry.startswith("re:"):
                if re.match(entry[3:], layer):
                    return True
            elif f".{layer}.".find(f".{entry}.") == 0 or layer.endswith(f".{entry}"):
                return True
        return False

    def describe(self) -> str:
        if self.form is None:
            return "float8 linear layers, quantised when loaded"
        if self.form.block is not None:
            return f"float8 linear layers, from blocks of {self.form.block} to a scale per row"
        return f"float8 linear layers of the checkpoint{', static activation scales' * self.form.static_inputs}"


def choose_quantization(option: str | None, hf_config: Any) -> Quantization | None:
    """From the option and the checkpoint's `quantization_config`.

    Raises:
        ValueError: a quantised checkpoint of another kind than those supported.
    """
    stored = getattr(hf_config, "quantization_config", None)
    if not stored:
        return Quantization() if option == "fp8" else None
    stored = _table(stored.to_dict() if hasattr(stored, "to_dict") else stored, "it")
    readers = {"fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors}
    method = stored.get("quant_method")
    if not isinstance(method, str) or method not in readers:
        raise ValueError(
            f"quantised checkpoints of quant_method {method!r} are not supported, only {', '.join(readers)}: {stored}"
        )
    return readers[method](stored)


def _read_fp8(stored: dict[str, Any]) -> Quantization:
    """`weight_scale` per tensor, or `weight_scale_inv` per block."""
    _expect(stored, "fmt", (None, "e4m3", "float8_e4m3fn"))
    _expect(stored, "activation_scheme", ("dynamic", "static"))
    block = stored.get("weight_block_size")
    if block is not None:
        if not (
            isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        ):
            raise ValueError(f"quantization_config: weight_block_size must be two positive numbers, got {block!r}")
        _expect(stored, "activation_scheme", ("dynamic",))
        block = (block[0], block[1])
    ignored = stored.get("ignored_layers") or stored.get("modules_to_not_convert") or []
    return Quantization(Fp8Form(block, stored["activation_scheme"] == "static"), _names(ignored))


def _read_compressed_tensors(stored: dict[str, Any]) -> Quantization:
    """float8 weights with `weight_scale` per tensor or channel, float8 activations."""
    _expect(stored, "format", (None, "float-quantized"))
    _expect(stored, "kv_cache_scheme", (None,))
    groups = _table(stored.get("config_groups") or {}, "config_groups")
    if len(groups) != 1:
        raise ValueError(f"quantization_config: only one of config_groups is supported, got {list(groups)}")
    group = _table(next(iter(groups.values())), "a group")
    _expect(group, "targets", (["Linear"],))
    _expect(group, "output_activations", (None,))
    weights, inputs = (_table(group.get(name) or {}, name) for name in ("weights", "input_activations"))
    for tensor in (weights, inputs):
        for name, value in FLOAT8.items():
            _expect(tensor, name, (value,))
        _expect(tensor, "symmetric", (True, None))
    _expect(weights, "strategy", ("tensor", "channel"))
    _expect(inputs, "dynamic", (True, False))
    _expect(inputs, "strategy", ("token",) if inputs["dynamic"] else ("tensor",))
    return Quantization(Fp8Form(None, not inputs["dynamic"]), _names(stored.get("ignore") or []))


def _expect(settings: dict[str, Any], name: str, values: tuple[Any, ...]) -> None:
    if settings.get(name) not in values:
        allowed = ", ".join(map(repr, values))
        raise ValueError(f"quantization_config: {name} {settings.get(name)!r} is not supported, only {allowed}")


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"quantization_config: {name} must be an object, got {value!r}")
    return value


def _names(ignored: Any) -> tuple[str, ...]:
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise ValueError(f"quantization_config: ignored layers must be a list of names, got {ignored!r}")
    for name in ignored:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"quantization_config: {name!r} is no regular expression ({error})") from error
    return tuple(ignored)


def quantize_layers(model: nn.Module, quantization: Quantization, from_checkpoint: bool) -> None:
    """Tell the linear layers, before their weights are loaded. Embedding and LM head stay in the model's dtype.

    Args:
        from_checkpoint: its tensors will come; else weights in the model's dtype, which are then quantised.

    Raises:
        ValueError: projections that are computed as one, of which only some are in float8.
    """
    for path, module in model.named_modules():
        if not isinstance(module, Linear) or isinstance(module, LMHead):
            continue
        parent = path.rpartition(".")[0]
        ignored = [name for name in module.parts if quantization.ignores(f"{parent}.{name}")]
        if ignored and len(ignored) < len(module.parts):
            raise ValueError(f"quantization_config: {parent} has {ignored} not in float8, but the rest of {path}")
        if not ignored:
            module.use_fp8(quantization.form if from_checkpoint else None)
