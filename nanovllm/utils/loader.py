"""From a checkpoint's tensors to the model's parameters, with every tensor accounted for.

The model knows which view of which parameter each checkpoint tensor fills (`destinations`); loading copies
tensor after tensor into its view and then looks for views that nothing filled.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from nanovllm.layers.linear import Linear
from nanovllm.layers.moe import Experts
from nanovllm.layers.ops import Ops

# Tensors that some checkpoints carry although they say nothing: rotary tables, and the head of a tied model.
REDUNDANT = re.compile(r"rotary_emb\.inv_freq$")
TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def destinations(model: nn.Module) -> dict[str, torch.Tensor]:
    """View to fill, by the name that the tensor has in a Hugging Face checkpoint."""
    views: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        if isinstance(module, (Linear, Experts)):
            views.update({_join(parent, name): view for name, view in module.part_views().items()})
        else:
            views.update({_join(path, name): p.data for name, p in module.named_parameters(recurse=False)})
    return views


def fused_destinations(model: nn.Module) -> dict[str, tuple[torch.Tensor, list[str]]]:
    """View to fill by a tensor that stands for several of `destinations`, and their names."""
    fused: dict[str, tuple[torch.Tensor, list[str]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            parent = path.rpartition(".")[0]
            for name, (view, parts) in module.fused_views().items():
                fused[_join(parent, name)] = view, [_join(parent, part) for part in parts]
    return fused


def load_weights(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> None:
    """Copy checkpoint tensors into `model`.

    Args:
        model: holds uninitialised parameters.
        tensors: (name, tensor), read one at a time.
        source: named in errors.

    Raises:
        ValueError: a tensor that is missing, unknown, repeated or of the wrong shape.
    """
    views, fused = destinations(model), fused_destinations(model)
    missing = set(views)
    tied_head: torch.Tensor | None = None
    for name, tensor in tensors:
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"{source}: tensor {name!r} has dtype {tensor.dtype}; quantised weights are not supported")
        if REDUNDANT.search(name):
            continue
        if name == TIED_HEAD and name not in views:
            tied_head = tensor
            continue
        if name not in views and name not in fused:
            raise ValueError(f"{source}: tensor {name!r} {list(tensor.shape)} does not belong to this model")
        view, filled = fused[name] if name in fused else (views[name], [name])
        if not missing.issuperset(filled):
            raise ValueError(f"{source}: tensor {name!r} is there twice")
        if view.shape != tensor.shape:
            raise ValueError(
                f"{source}: tensor {name!r} has shape {list(tensor.shape)}, the config asks for {list(view.shape)}"
            )
        view.copy_(tensor)
        missing.difference_update(filled)
    if tied_head is not None:
        embedding = views[EMBEDDING]
        if tied_head.shape != embedding.shape or not torch.equal(tied_head.to(embedding), embedding):
            raise ValueError(f"{source}: the config ties {TIED_HEAD!r} to the embedding, but the checkpoint's differs")
    if missing:
        some = ", ".join(sorted(missing)[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(f"{source}: {len(missing)} of {len(views)} tensors are missing: {some}")


def fill_with_random_weights(model: nn.Module, seed: int) -> None:
    """Dummy weights: normal matrices of the usual scale, norms at 1, biases small."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(0.01 if name.endswith("bias") else 1.0)


def optimize_linears(model: nn.Module, ops: Ops) -> None:
    """Let every linear layer take its fastest form."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.optimize(ops)


def is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, Linear) and module.packed for module in model.modules())


def safetensors_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a folder's `model.safetensors`, of the shards in its index, or of its only safetensors file.

    Raises:
        ValueError: no such file, an index that is broken, leads out of the folder or misses shards, a corrupt file.
    """
    for file, names in _safetensors_files(folder):
        yield from _read_safetensors(file, names)


def _safetensors_files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """Files to read and the tensors to expect in each (None: whatever is there)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(folder, index)
    single = folder / "model.safetensors"
    if single.is_file():
        return [(single, None)]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return [(found[0], None)]
    names = ", ".join(file.name for file in found) or "no safetensors file"
    raise ValueError(f"{folder}: expected model.safetensors or model.safetensors.index.json, found {names}")


def _indexed_files(folder: Path, index: Path) -> list[tuple[Path, set[str] | None]]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            shards.setdefault(shard, set()).add(name)
        if not all(isinstance(shard, str) for shard in shards):
            raise TypeError("a shard is not a string")
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{index}: not a valid index of safetensors shards ({error!r})") from error
    for shard in shards:
        if Path(shard).name != shard:
            raise ValueError(f"{index}: shard {shard!r} is not a file name inside the folder")
    missing = [shard for shard in sorted(shards) if not (folder / shard).is_file()]
    if missing:
        raise ValueError(f"{index}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:5])}")
    return [(folder / shard, names) for shard, names in sorted(shards.items())]


def _read_safetensors(file: Path, names: set[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as reader:
            found = set(reader.keys())
            absent = sorted((names or set()) - found)
            if absent:
                raise ValueError(f"{file}: tensor {absent[0]!r} is in the index but not in the shard")
            for name in reader.keys():  # noqa: SIM118 - a safetensors reader is no mapping
                yield name, reader.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a valid safetensors file ({error})") from error


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
