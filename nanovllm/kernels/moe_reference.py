"""A layer of experts in plain torch: what the kernels are tested against, and the CPU engine's own path."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.reference import silu_mul


def route(logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` experts of each token by softmax over all experts, computed in float32.

    logits: [num_tokens, num_experts]
    normalize: whether the chosen weights of a token are scaled to a sum of 1
    Returns (weights float32, experts int64), both [num_tokens, top_k], largest weight first.
    """
    weights, experts = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, experts


def moe(
    x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, top_k: int, normalize: bool
) -> torch.Tensor:
    """Sum over a token's experts of weight * down(silu(gate(x)) * up(x)) (Shazeer et al., 2017).

    x: [num_tokens, hidden]
    logits: [num_tokens, num_experts], the router's
    gate_up: [num_experts, 2 * intermediate, hidden], gate first
    down: [num_experts, hidden, intermediate]
    Returns [num_tokens, hidden].
    """
    weights, experts = route(logits, top_k, normalize)
    pairs = experts.flatten()
    order = pairs.argsort(stable=True)
    outputs = x.new_empty(len(pairs), x.shape[1])
    for expert, chosen in enumerate(order.split(pairs.bincount(minlength=len(down)).tolist())):
        if len(chosen):
            inner = silu_mul(F.linear(x[chosen // top_k], gate_up[expert]))
            outputs[chosen] = F.linear(inner, down[expert])
    return torch.einsum("tk,tkh->th", weights, outputs.view(-1, top_k, x.shape[1]).float()).to(x.dtype)
