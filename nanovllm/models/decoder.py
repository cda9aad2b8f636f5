"""The decoder that the families share: pre-norm attention and gated MLP, or experts, on a residual stream.

A family differs from another in `DecoderSpec`; what a checkpoint tensor is called follows from the module tree.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from nanovllm.engine.step import Step
from nanovllm.kernels.reference import soft_cap_
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.embed_head import LMHead, make_embedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear, row_linear
from nanovllm.layers.moe import MoE, MoESpec, ShardedMoE
from nanovllm.layers.ops import Ops
from nanovllm.layers.parallel import Ranks, Runs
from nanovllm.layers.rotary_embedding import build_cos_sin, head_order, rope_limit, rope_settings, rotary_dim

# Settings that would change the result, and the value at which they do not. Of those that are fields of `DecoderSpec`,
# too, a family may say that it implements them.
NEUTRAL = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "clip_qkv": None,
}


@dataclass(frozen=True)
class DecoderSpec:
    """Shapes and switches of a decoder."""

    hf_config: Any
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: dict[str, Any]  # `rope_settings`
    max_positions: int  # longest sequence
    max_positions_note: str  # on what limits it, to end an error message with
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoESpec | None = None
    fused_parts: bool = False  # checkpoints hold qkv_proj and gate_up_proj as one tensor each
    windows: tuple[int | None, ...] = ()  # of each layer: keys that a token sees, itself included; empty: all, in all
    layer_class: type[nn.Module] | None = None  # None: DecoderLayer
    scale: float | None = None  # on attention's scores; None: head_dim**-0.5
    norm_offset: float = 0.0  # what norms add to the weights in the checkpoint
    float32_norms: bool = False  # norms multiply by their weights in float32 and round once, not before and after
    embedding_scale: float | None = None  # on the embeddings, rounded to the model's dtype
    window_rope: dict[str, Any] | None = None  # rotary settings of layers with a window; None: `rope`
    partial_rotary: bool = False  # heads may be rotated in part
    attn_logit_softcapping: float | None = None  # soft cap of attention's scores
    final_logit_softcapping: float | None = None  # of the logits
    total_kv_heads: int | None = None  # of all ranks, where there are several (see `rank_spec`)

    @classmethod
    def from_config(cls, hf_config: Any, **switches: Any) -> "DecoderSpec":
        """Spec from a transformers config; `switches` are further fields.

        Raises:
            ValueError: a setting that would change the result and is not implemented.
        """
        activation = getattr(hf_config, "hidden_act", None) or "silu"
        if activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act {activation!r} is not supported, only 'silu'")
        for name, neutral in NEUTRAL.items():
            if name not in switches and getattr(hf_config, name, None) not in (None, neutral):
                raise ValueError(f"{name} {getattr(hf_config, name)!r} in the model's config is not supported")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in sizes:
            _size(hf_config, name)
        num_q_heads = hf_config.num_attention_heads
        num_kv_heads = _size(hf_config, "num_key_value_heads", num_q_heads)
        if not isinstance(hf_config.rms_norm_eps, float) or not 0 <= hf_config.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps in the model's config must be in [0, 1), got {hf_config.rms_norm_eps}")
        if num_q_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads {num_q_heads} is not a multiple of {num_kv_heads} KV heads")
        head_dim = _size(hf_config, "head_dim", hf_config.hidden_size // num_q_heads)
        rope = switches.pop("rope", None) or rope_settings(hf_config)
        if rotary_dim(rope, head_dim) != head_dim and not switches.get("partial_rotary"):
            raise ValueError(f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported, only 1")
        max_positions, note = rope_limit(rope, hf_config.max_position_embeddings)
        return cls(
            hf_config=hf_config,
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            num_layers=hf_config.num_hidden_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=hf_config.rms_norm_eps,
            tie_word_embeddings=bool(getattr(hf_config, "tie_word_embeddings", False)),
            rope=rope,
            max_positions=max_positions,
            max_positions_note=note,
            **switches,
        )


def _size(hf_config: Any, name: str, default: int | None = None) -> int:
    """A positive number of the config; `default` where it has none."""
    value = getattr(hf_config, name, None)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} in the model's config must be 1 or more, got {value}")
    return value


@dataclass(frozen=True)
class Build:
    """Where and with what a model is built."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops
    attention: AttentionBackend
    max_model_len: int
    ranks: Ranks = field(default_factory=Ranks)


def make_norm(spec: DecoderSpec, size: int, build: Build) -> RMSNorm:
    dtype = torch.float32 if spec.float32_norms else build.dtype
    return RMSNorm(size, spec.rms_norm_eps, dtype, build.device, build.ops, spec.norm_offset)


def qk_order(spec: DecoderSpec) -> torch.Tensor | None:
    """Order of qkv_proj's rows in which halves of heads turn; None: the checkpoint's."""
    turning = rotary_dim(spec.rope, spec.head_dim)
    if turning == spec.head_dim:
        return None
    assert not spec.qk_norm  # its weights would need the same order
    rows = torch.arange((spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim).view(-1, spec.head_dim)
    rotated = spec.num_q_heads + spec.num_kv_heads
    rows[:rotated] = rows[:rotated, head_order(spec.head_dim, turning)]
    return rows.flatten()


def query_runs(spec: DecoderSpec, ranks: Ranks) -> Runs:
    """This rank's rows of the query projection."""
    return ranks.runs(spec.num_q_heads * spec.head_dim * ranks.size)


def kv_runs(spec: DecoderSpec, ranks: Ranks) -> Runs:
    """This rank's rows of the key and of the value projection; ranks may have the same ones."""
    total, rows = spec.total_kv_heads or spec.num_kv_heads, spec.head_dim
    first = ranks.rank * total // ranks.size
    return Runs(total * rows, ((first * rows, (first + spec.num_kv_heads) * rows),))


def column_linear(
    spec: DecoderSpec, projections: dict[str, Runs], fused: str, bias: bool, build: Build, **options: Any
) -> Linear:
    """Projections of the hidden state, of whose outputs this rank computes `projections`; `fused`: their name when
    the checkpoint has them in one tensor."""
    if spec.fused_parts:
        projections = {fused: Runs.joined(list(projections.values()))}
    parts = {name: sum(stop - start for start, stop in runs.pieces) for name, runs in projections.items()}
    held = projections if build.ranks.size > 1 else None
    return Linear(spec.hidden_size, parts, bias, build.dtype, build.device, held=held, **options)


class Attention(nn.Module):
    def __init__(self, spec: DecoderSpec, layer: int, build: Build, cos_sin: torch.Tensor):
        super().__init__()
        self.layer = layer
        self.num_q_heads = spec.num_q_heads
        self.eps = spec.rms_norm_eps
        self.scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.window = spec.windows[layer] if spec.windows else None
        self.softcap = spec.attn_logit_softcapping
        q, kv = query_runs(spec, build.ranks), kv_runs(spec, build.ranks)
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = column_linear(spec, rows, "qkv_proj", spec.qkv_bias, build, order=qk_order(spec))
        where = (build.dtype, build.device, build.ranks)
        self.o_proj = row_linear(spec.num_q_heads * spec.head_dim, {"o_proj": spec.hidden_size}, spec.o_bias, *where)
        self.q_norm = make_norm(spec, spec.head_dim, build) if spec.qk_norm else None
        self.k_norm = make_norm(spec, spec.head_dim, build) if spec.qk_norm else None
        self.norms_heads = spec.qk_norm
        self._cos_sin = cos_sin
        self._build = build

    def forward(self, x: torch.Tensor, step: Step, wanted: torch.Tensor | None) -> torch.Tensor:
        """Of all tokens, or of those `wanted`; keys and values are written of all."""
        k_cache, v_cache = step.kv_cache[self.layer]
        scales = None if step.kv_scales is None else step.kv_scales[self.layer]
        q = self._build.ops.norm_rope_store(
            self._project(x),
            step.positions,
            step.slots,
            self._cos_sin,
            self.q_norm.weight if self.q_norm and self.norms_heads else None,
            self.k_norm.weight if self.k_norm and self.norms_heads else None,
            self.eps,
            k_cache,
            v_cache,
            self.num_q_heads,
            scales,
        )
        out = self._build.attention.attend(q, k_cache, v_cache, step, self.scale, self.window, scales, self.softcap)
        out = out.flatten(1)
        return self.o_proj.parts_of(out if wanted is None else out[wanted])

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [T, (num_q_heads + 2 num_kv_heads) * head_dim]."""
        return self.qkv_proj(x)


class MLP(nn.Module):
    def __init__(self, spec: DecoderSpec, build: Build):
        super().__init__()
        runs = build.ranks.runs(spec.intermediate_size * build.ranks.size)
        rows = {"gate_proj": runs, "up_proj": runs}
        self.gate_up_proj = column_linear(spec, rows, "gate_up_proj", spec.mlp_bias, build)
        where = (spec.mlp_bias, build.dtype, build.device, build.ranks)
        self.down_proj = row_linear(spec.intermediate_size, {"down_proj": spec.hidden_size}, *where)
        self._silu_mul = build.ops.silu_mul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj.parts_of(self._silu_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, spec: DecoderSpec, layer: int, build: Build, cos_sin: torch.Tensor):
        super().__init__()
        self.input_layernorm = make_norm(spec, spec.hidden_size, build)
        self.self_attn = Attention(spec, layer, build, cos_sin)
        self.post_attention_layernorm = make_norm(spec, spec.hidden_size, build)
        if spec.moe is not None and layer in spec.moe.layers:
            experts = MoE if build.ranks.size == 1 else ShardedMoE
            where = (build.dtype, build.device, build.ops, build.ranks)
            self.mlp: nn.Module = experts(spec.hidden_size, spec.moe, *where)
        else:
            self.mlp = MLP(spec, build)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` is the last sublayer's output, not yet added to `residual` (None in the first layer).

        Both are of all tokens; of those `wanted`, if given, in what is returned.
        """
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, step, wanted)
        residual = residual if wanted is None else residual[wanted]
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class DecoderModel(nn.Module):
    def __init__(self, spec: DecoderSpec, build: Build):
        super().__init__()
        where = (build.dtype, build.device)
        rotation = (spec.head_dim, build.max_model_len, build.device)
        cos_sin = build_cos_sin(spec.hf_config, spec.rope, *rotation)
        in_window = build_cos_sin(spec.hf_config, spec.window_rope, *rotation) if spec.window_rope else cos_sin
        windows = spec.windows or (None,) * spec.num_layers
        self.embed_tokens = make_embedding(spec.vocab_size, spec.hidden_size, *where, build.ranks)
        layer_class = spec.layer_class or DecoderLayer
        self.layers = nn.ModuleList(
            layer_class(spec, i, build, cos_sin if window is None else in_window) for i, window in enumerate(windows)
        )
        self.norm = make_norm(spec, spec.hidden_size, build)
        self._embedding_scale: torch.Tensor | None = None
        if spec.embedding_scale is not None:
            self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=build.dtype, device=build.device)

    def forward(self, input_ids: torch.Tensor, step: Step) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        residual: torch.Tensor | None = None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, step)
        # Nothing attends to what comes after the last layer's keys and values.
        x, residual = self.layers[-1](x, residual, step, step.wanted)
        assert residual is not None
        return self.norm.add(x, residual)[0]


class DecoderForCausalLM(nn.Module):
    """Token ids [T] to hidden states [T, hidden_size] (or of the tokens `step.wanted`), and those to logits."""

    def __init__(self, spec: DecoderSpec, build: Build):
        super().__init__()
        self.spec = spec
        self.ranks = build.ranks
        self.dtype = build.dtype
        self.model = DecoderModel(spec, build)
        tied = self.model.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = LMHead(spec.vocab_size, spec.hidden_size, build.dtype, build.device, tied, build.ranks)

    def forward(self, input_ids: torch.Tensor, step: Step) -> torch.Tensor:
        return self.model(input_ids, step)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden_size] to [n, logit_columns], into `out` if given."""
        logits = self.lm_head(hidden) if out is None else self.lm_head.write_logits(hidden, out)
        cap = self.spec.final_logit_softcapping
        return logits if cap is None else soft_cap_(logits, cap)

    @property
    def logit_columns(self) -> int:
        """Of `compute_logits`: with several ranks those of this rank's token ids, and perhaps one without meaning."""
        return self.ranks.padded_vocab(self.spec.vocab_size)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor | None:
        """[n, vocab_size] from every rank's `compute_logits`; None on other ranks than 0."""
        if self.ranks.size == 1:
            return logits
        shares = self.ranks.gather(logits)
        if shares is None:
            return None
        bounds = [replace(self.ranks, rank=rank).vocab(self.spec.vocab_size) for rank in range(self.ranks.size)]
        return torch.cat([share[:, : end - first] for share, (first, end) in zip(shares, bounds, strict=True)], dim=1)
