"""From a checkpoint's tensors to the model's parameters, with every tensor accounted for.

The model knows which view of which parameter each checkpoint tensor fills (`destinations`); loading copies
tensor after tensor into its view and then looks for views that nothing filled.
"""

import re
from collections.abc import Iterable

import torch
from torch import nn

from nanovllm.kernels.reference import FP8
from nanovllm.layers.embed_head import Embedding
from nanovllm.layers.layernorm import RMSNorm, ShardedNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.moe import Experts, MoE
from nanovllm.layers.ops import Ops
from nanovllm.layers.parallel import Cut
from nanovllm.utils.safetensors_files import wrong_shape

# Tensors that some checkpoints carry although they say nothing: rotary tables, and the head of a tied model.
REDUNDANT = re.compile(r"rotary_emb\.inv_freq$")
TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
FP8_SCALES = (".weight_scale", ".input_scale")
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def destinations(model: nn.Module) -> dict[str, torch.Tensor]:
    """View to fill, by the name that the tensor has in a Hugging Face checkpoint."""
    views: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        if isinstance(module, (Linear, Experts)):
            views.update({_join(parent, name): view for name, view in module.part_views().items()})
        elif isinstance(module, Embedding):
            views.update({_join(path, name): view for name, view in module.part_views().items()})
        else:
            views.update({_join(path, name): p.data for name, p in module.named_parameters(recurse=False)})
    return views


def cuts(model: nn.Module) -> dict[str, Cut]:
    """What this rank takes of the checkpoint's tensors, by name; of others it takes all. Empty with one rank."""
    found: dict[str, Cut] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        if isinstance(module, (Linear, Experts)):
            found.update({_join(parent, name): cut for name, cut in module.part_cuts().items()})
        elif isinstance(module, (Embedding, ShardedNorm)):
            found.update({_join(path, name): cut for name, cut in module.part_cuts().items()})
    if EMBEDDING in found:
        found.setdefault(TIED_HEAD, found[EMBEDDING])
    return found


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
        tensors: (name, tensor, or this rank's part as `cuts` says), read one at a time.
        source: named in errors.

    Raises:
        ValueError: a tensor that is missing, unknown, repeated or of the wrong shape.
    """
    views, fused = destinations(model), fused_destinations(model)
    missing = set(views)
    tied_head: torch.Tensor | None = None
    for name, tensor in tensors:
        if tensor.dtype not in WEIGHT_DTYPES and (name not in views or views[name].dtype != tensor.dtype):
            raise ValueError(f"{source}: tensor {name!r} has dtype {tensor.dtype}; quantised weights are not supported")
        if REDUNDANT.search(name):
            continue
        if name == TIED_HEAD and name not in views:
            tied_head = tensor
            continue
        if name not in views and name not in fused:
            raise ValueError(f"{source}: tensor {name!r} {list(tensor.shape)} does not belong to this model")
        view, filled = fused[name] if name in fused else (views[name], [name])
        if view.dtype == FP8 and tensor.dtype != FP8:
            raise ValueError(f"{source}: tensor {name!r} has dtype {tensor.dtype}, the config asks for {view.dtype}")
        if name.endswith(FP8_SCALES):
            tensor = scales_like(tensor, view)
        if not missing.issuperset(filled):
            raise ValueError(f"{source}: tensor {name!r} is there twice")
        if view.shape != tensor.shape:
            raise wrong_shape(source, name, tensor.shape, view.shape)
        view.copy_(tensor)
        missing.difference_update(filled)
    if tied_head is not None:
        embedding = views[EMBEDDING]
        if tied_head.shape != embedding.shape or not torch.equal(tied_head.to(embedding), embedding):
            raise ValueError(f"{source}: the config ties {TIED_HEAD!r} to the embedding, but the checkpoint's differs")
    if missing:
        some = ", ".join(sorted(missing)[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(f"{source}: {len(missing)} of {len(views)} tensors are missing: {some}")


def scales_like(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Scales as a layer has them, [out] or [1], from a tensor's ([] or [1]) or from channels' ([out] or [out, 1])."""
    flat = tensor.flatten()
    return flat.expand_as(view) if flat.numel() == 1 else flat


def fill_with_random_weights(model: nn.Module, seed: int, rank: int | None = None) -> None:
    """Dummy weights: normal matrices of the usual scale, norms at 1, biases small.

    What all ranks hold is the same on all; the rest differs, so that another number of ranks is another model.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    own = generator if rank is None else torch.Generator(device=device).manual_seed(seed + 1 + rank)
    shared = {id(p) for module in model.modules() if isinstance(module, MoE) for p in module.gate.parameters()}
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.02, generator=generator if id(parameter) in shared else own)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(0.01 if name.endswith("bias") else 1.0)


def finish_loading(model: nn.Module, ops: Ops) -> None:
    """With the weights in place: every norm takes in its offset, every linear layer its fastest form."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.optimize(ops)
        elif isinstance(module, RMSNorm):
            module.finish_loading()


def is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, Linear) and module.packed for module in model.modules())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
