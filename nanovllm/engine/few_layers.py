"""A model cut down to what still launches each of its kernels, to compile and load them in little time."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from nanovllm.models.decoder import Attention, DecoderForCausalLM


@contextmanager
def few_layers(model: DecoderForCausalLM) -> Iterator[None]:
    """Meanwhile the first layer of each kind and the last one, which may compute fewer tokens, are all there are."""
    decoder, layers = model.model, model.model.layers
    first_of = {_kind(layer): layer for layer in reversed(layers)}
    decoder.layers = nn.ModuleList([layer for layer in layers[:-1] if first_of[_kind(layer)] is layer] + [layers[-1]])
    try:
        yield
    finally:
        decoder.layers = layers


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Layers of which this is equal launch the same kernels."""
    parts = [(type(part), getattr(part, "fp8", None) is not None) for part in layer.modules()]
    assert isinstance(layer.self_attn, Attention)
    return layer.self_attn.window, *parts
