"""A checkpoint in one GGUF file: config, weights and tokenizer under their Hugging Face names.

The header is read here, since a tokenizer's several hundred thousand strings take a generic reader seconds;
what the block formats mean is left to the `gguf` package.
"""

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, dequantize
from gguf import GGMLQuantizationType as TensorType

from nanovllm.layers.parallel import Cut
from nanovllm.utils.checkpoint import check_num_layers
from nanovllm.utils.safetensors_files import wrong_shape

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # by architecture; what transformers calls them
# Types of metadata values: struct codes of the scalars by their number in the format, and the two others.
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9

# Tensors of these are read as they are, others dequantised.
PLAIN_TYPES = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"

# Metadata that changes what a model computes and that these architectures' configs have no field for.
REFUSED_KEYS = ["expert_count", "attention.sliding_window", "attention.scale", "attention.clamp_kqv"]
REFUSED_KEYS += ["logit_scale", "embedding_scale", "residual_scale", "rope.scale_linear"]


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file and how it is stored; `shape` is in row-major order."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFCheckpoint:
    """A `.gguf` file. Opening it reads the header; tensors are read when asked for.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not GGUF, truncated or corrupt, or of an unsupported architecture.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._metadata, self._tensors = _read_header(self._data)
        except ValueError as error:
            raise ValueError(f"{self.path}: not a complete, valid GGUF file: {error}") from error
        self._architecture = self._field("general.architecture", str)
        if self._architecture not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(f"{self.path}: architecture {self._architecture!r} is not supported, only {known}")

    def config(self) -> Any:
        """A transformers config with what the metadata and the tensors say.

        Raises:
            ValueError: metadata that is missing, of a wrong type, or that the config cannot represent.
        """
        import transformers

        fields = self._config_fields()
        try:
            return getattr(transformers, f"{FAMILIES[self._architecture]}Config")(**fields)
        except Exception as error:  # transformers validates with many exception types
            raise ValueError(f"{self.path}: transformers refuses the config: {error}") from error

    def weights(
        self, device: torch.device | str = "cpu", cuts: Mapping[str, Cut] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor on `device`) of every tensor, dequantised one at a time on the CPU.

        Quantised tensors come in float32, others in the type that they are stored in; those in `cuts` are cut then.

        Raises:
            ValueError: a tensor whose name is unknown, of a type that cannot be dequantised, or of another shape than
                its cut is for.
        """
        for info, name in self._named_tensors():
            tensor, cut = self._read(info).to(device), (cuts or {}).get(name)
            if self._architecture == "llama":
                tensor = self._unpermuted(info, tensor)
            if cut is not None and info.shape != cut.shape:
                raise wrong_shape(self.path, name, info.shape, cut.shape)
            yield name, tensor if cut is None else cut.of(tensor)

    def names(self) -> list[str]:
        """Hugging Face names of all tensors; raises ValueError like `weights`."""
        return [name for _, name in self._named_tensors()]

    def tokenizer(self) -> Any:
        """A `PreTrainedTokenizerFast` built from the metadata, None when the file holds no tokenizer.

        Raises:
            ValueError: a tokenizer of a kind that is not supported, or broken.
        """
        from nanovllm.utils.gguf_tokenizer import build_tokenizer

        try:
            known = self._metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")
            return build_tokenizer(self._metadata) if known else None
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def eos_token_ids(self) -> list[int]:
        """Ids that end a completion: end of sequence, of turn and of message, as far as the file names them."""
        keys = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
        return list(dict.fromkeys(self._field(key, int) for key in keys if key in self._metadata))

    def _field(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(key, default)
        if value is None:
            raise ValueError(f"{self.path}: metadata {key!r} is missing")
        if type(value) is not kind:
            raise ValueError(f"{self.path}: metadata {key!r} should be one {kind.__name__}, is {str(value)[:80]}")
        return value

    def _size(self, key: str, default: int | None = None) -> int:
        """A positive number of the architecture's metadata."""
        value = self._field(f"{self._architecture}.{key}", int, default)
        if value < 1:
            raise ValueError(f"{self.path}: metadata '{self._architecture}.{key}' must be positive, is {value}")
        return value

    def _config_fields(self) -> dict[str, Any]:
        for key in (f"{self._architecture}.{key}" for key in REFUSED_KEYS):
            if self._metadata.get(key):
                raise ValueError(f"{self.path}: metadata {key!r} = {self._metadata[key]} is not supported")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ValueError(f"{self.path}: no tensor 'token_embd.weight' with two dimensions")
        hidden, heads = self._size("embedding_length"), self._size("attention.head_count")
        head_dim = self._size("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._size(key, head_dim) != head_dim:
                raise ValueError(f"{self.path}: {key} {self._size(key)} unlike head size {head_dim} is not supported")
        theta = self._field(f"{self._architecture}.rope.freq_base", float, 10000.0)
        eos = self.eos_token_ids()
        num_layers = self._size("block_count")
        check_num_layers(num_layers, self.path)
        return {
            "architectures": [f"{FAMILIES[self._architecture]}ForCausalLM"],
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._size("feed_forward_length"),
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._field(f"{self._architecture}.attention.layer_norm_rms_epsilon", float),
            "max_position_embeddings": self._size("context_length"),
            # Both versions of transformers take this pair; 5 makes `rope_parameters` of it.
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(theta, head_dim),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "pad_token_id": self._metadata.get("tokenizer.ggml.padding_token_id"),
            # Quantised checkpoints were made from bfloat16 ones, whose range float16 need not hold.
            "dtype": PLAIN_TYPES.get(embedding.kind, torch.bfloat16),
            # Not read by every family: in qwen2, q, k and v always have a bias.
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
        }

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        """`rope_scaling` of the config, from the metadata or from the tensor of factors by frequency."""
        prefix = f"{self._architecture}.rope.scaling."
        fields = {key.removeprefix(prefix): value for key, value in self._metadata.items() if key.startswith(prefix)}
        kind = fields.pop("type", "none")
        if ROPE_FACTORS in self._tensors:
            factors = self._read(self._tensors[ROPE_FACTORS]).double().numpy()
            if kind != "none" or factors.shape != (head_dim // 2,):
                raise ValueError(f"{self.path}: {ROPE_FACTORS} {list(factors.shape)} with {kind!r} rope scaling")
            return self._llama3_scaling(factors, theta, head_dim)
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ValueError(f"{self.path}: rope scaling {kind!r} is not supported; supported are linear, yarn")
        fields.pop("finetuned", None)  # says where the model comes from, not what it computes
        scaling = {"rope_type": kind, "factor": self._field(f"{prefix}factor", float)}
        if kind == "yarn":
            window = self._size("rope.scaling.original_context_length", self._size("context_length"))
            scaling["original_max_position_embeddings"] = window
        for key, value in fields.items():
            if kind == "yarn" and key in ("yarn_beta_fast", "yarn_beta_slow"):
                scaling[key.removeprefix("yarn_")] = value
            elif key not in ("factor", "original_context_length") and not (key.endswith("_factor") and value == 1):
                raise ValueError(f"{self.path}: metadata {prefix + key!r} = {value} is not supported")
        return scaling

    def _llama3_scaling(self, factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
        """The settings that give these factors. The file has only the outcome, so the usual settings are tried."""
        if np.all(factors == 1):
            return None
        factor, window, low, high = float(factors.max()), 8192, 1.0, 4.0
        wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((window / wavelengths - low) / (high - low), 0, 1)
        if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
            raise ValueError(f"{self.path}: the factors in {ROPE_FACTORS} are not those of a known rope scaling")
        scaling = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": window}
        return scaling | {"low_freq_factor": low, "high_freq_factor": high}

    def _named_tensors(self) -> list[tuple[TensorInfo, str]]:
        return [(info, self._hf_name(name)) for name, info in self._tensors.items() if name != ROPE_FACTORS]

    def _hf_name(self, name: str) -> str:
        match = TENSOR_NAME.fullmatch(name)
        layer, part, kind = match.groups() if match else (None, "", "")
        if layer is None and part in TOP_NAMES:
            return f"{TOP_NAMES[part]}.{kind}"
        if layer is not None and part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
        raise ValueError(f"{self.path}: tensor {name!r} is not known in a {self._architecture} model")

    def _read(self, info: TensorInfo) -> torch.Tensor:
        raw = np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)
        if info.kind in PLAIN_TYPES:  # copied, since the file is mapped read-only
            return torch.from_numpy(raw.copy()).view(PLAIN_TYPES[info.kind]).reshape(info.shape)
        try:
            # How blocks are split into rows does not matter to the values; `dequantize` is fastest on long rows.
            block_bytes = GGML_QUANT_SIZES[info.kind][1]
            blocks_per_row = math.gcd(info.num_bytes // block_bytes, 256)
            values = dequantize(raw.reshape(-1, blocks_per_row * block_bytes), info.kind)
        except NotImplementedError as error:
            what = f"{self.path}: tensor {info.name!r}"
            raise ValueError(f"{what} is of type {info.kind.name}, which cannot be dequantised") from error
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(info.shape)

    def _unpermuted(self, info: TensorInfo, tensor: torch.Tensor) -> torch.Tensor:
        """Undo what conversion of the llama architecture does to q and k.

        Each head's rows come in pairs (i, i + half) that rotate together; the models here have the halves apart.
        """
        key = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}.get(info.name.split(".")[-2])
        if key is None:
            return tensor
        heads = self._size(key, self._size("attention.head_count"))
        if info.shape[0] % (2 * heads):
            raise ValueError(f"{self.path}: tensor {info.name!r} has {info.shape[0]} rows for {heads} heads")
        return tensor.reshape(heads, -1, 2, *info.shape[1:]).transpose(1, 2).reshape(info.shape)


class _Cursor:
    """Reads little-endian values one after another, never past the end, whatever counts a corrupt file holds."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.size = len(data)
        self.position = 0

    def take(self, num_bytes: int) -> int:
        """Offset of the next `num_bytes`, which are passed over."""
        start = self.position
        if num_bytes > self.size - start:
            raise ValueError(f"the header goes on past the end of the file at byte {self.size}")
        self.position = start + num_bytes
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        start = self.take(self.number("Q"))
        return self.data[start : self.position].decode("utf-8")

    def value(self) -> Any:
        kind = self.number("I")
        if kind != ARRAY:
            return self.string() if kind == STRING else self.number(_scalar_code(kind))
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            return [self.string() for _ in range(count)]
        dtype = np.dtype(f"<{_scalar_code(kind)}")
        return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).tolist()


def _scalar_code(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"a metadata value is of type {kind}, which is not known there")
    return SCALARS[kind]


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata, and tensors by name, each checked to lie within the file."""
    if data[:4] != b"GGUF":
        raise ValueError(f"it starts with {data[:4]!r}, not with b'GGUF'")
    cursor = _Cursor(data)
    cursor.take(4)
    version, num_tensors, num_fields = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
    if version not in (2, 3):
        raise ValueError(f"version {version}{' (big-endian?)' if version & 0xFFFF == 0 else ''} is not supported")
    metadata = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value()
    infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"its alignment is {alignment}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        end = start + info.offset + info.num_bytes
        if end > len(data):
            raise ValueError(f"tensor {info.name!r} ends at byte {end}, the file already at {len(data)}")
        if info.name in tensors:
            raise ValueError(f"tensor {info.name!r} is there twice")
        tensors[info.name] = replace(info, offset=start + info.offset)
    return metadata, tensors


def _read_tensor_info(cursor: _Cursor) -> TensorInfo:
    """An entry of the header; its offset counts from the end of the header."""
    name, num_dimensions = cursor.string(), cursor.number("I")
    if not 1 <= num_dimensions <= 4:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in iter(TensorType):
        raise ValueError(f"tensor {name!r} is of an unknown type, number {number}")
    kind = TensorType(number)
    block_items, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_items or 0 in shape:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} does not fit the blocks of type {kind.name}")
    return TensorInfo(name, kind, shape, offset, math.prod(shape) // block_items * block_bytes)
