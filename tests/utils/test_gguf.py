"""GGUF files of small random models against the transformers models that they were written from."""

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from nanovllm.utils.default_model import default_model_path
from nanovllm.utils.gguf import GGUFCheckpoint

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_TOPS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def small_model(family: str, **changes):
    config = CONFIGS[family](
        **{
            "vocab_size": 101,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32 if family == "qwen3" else 16,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,
            **changes,
        }
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    return model


def gguf_name(name: str) -> str:
    path, kind = name.rsplit(".", 1)
    if path in GGUF_TOPS:
        return f"{GGUF_TOPS[path]}.{kind}"
    layer, part = path.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{GGUF_PARTS[part]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """As written for the llama architecture: rows i and i + half of each head side by side."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def metadata_of(model, family: str) -> dict:
    config = model.config
    return {
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.key_length": config.head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{family}.rope.freq_base": 5000.0,
    }


def write_gguf(path: Path, family: str, metadata: dict, tensors: dict[str, tuple[np.ndarray, Kind]]) -> Path:
    writer = gguf.GGUFWriter(path, family)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
    for key, value in metadata.items():
        add.get(type(value), writer.add_array)(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path: Path, model, family: str, kind: Kind = Kind.F32, **metadata) -> dict[str, torch.Tensor]:
    """Write `model` with its matrices as `kind`; return the tensors that a reader should find."""
    tensors, expected = {}, {}
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        stored = kind if tensor.dim() == 2 else Kind.F32
        quantised = gguf.quantize(tensor.numpy(), stored)
        expected[name] = torch.from_numpy(gguf.dequantize(quantised, stored).copy()).reshape(tensor.shape)
        heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
        part = name.split(".")[-2]
        if family == "llama" and part in heads:
            quantised = interleave(quantised, heads[part])
        tensors[gguf_name(name)] = (quantised, stored)
    write_gguf(path, family, metadata_of(model, family) | metadata, tensors)
    return expected


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(2, 42)[None] * 7 % 101).logits


def model_of(checkpoint: GGUFCheckpoint):
    model = AutoModelForCausalLM.from_config(checkpoint.config(), dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(dict(checkpoint.weights()), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    return model


@pytest.fixture
def small_file(tmp_path) -> Path:
    path = tmp_path / "small.gguf"
    write_model(path, small_model("llama"), "llama")
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_model_computes_what_it_did_before_conversion(tmp_path, family, tied):
    model = small_model(family, tie_word_embeddings=tied)
    expected = write_model(tmp_path / "m.gguf", model, family)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert sorted(checkpoint.names()) == sorted(expected)
    assert ("lm_head.weight" in checkpoint.names()) is not tied
    for name, tensor in checkpoint.weights():
        assert torch.equal(tensor, expected[name]), name
    torch.testing.assert_close(logits(model_of(checkpoint)), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_stored_types(tmp_path, kind):
    expected = write_model(tmp_path / "m.gguf", small_model("llama"), "llama", kind)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    plain = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    assert checkpoint.config().dtype == plain.get(kind, torch.bfloat16)
    for name, tensor in checkpoint.weights():
        assert tensor.dtype == (plain.get(kind, torch.float32) if tensor.dim() == 2 else torch.float32)
        assert torch.equal(tensor.float(), expected[name]), name


@pytest.mark.filterwarnings("ignore:invalid value")  # random scales may be infinite
@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS])
def test_types_that_only_other_programs_write(tmp_path, kind):
    items, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(5).integers(0, 256, (6, 512 // items, size), dtype=np.uint8)
    raw = blocks.reshape(6, -1)
    write_gguf(tmp_path / "m.gguf", "qwen2", {}, {"output.weight": (raw, kind)})
    ((name, tensor),) = GGUFCheckpoint(tmp_path / "m.gguf").weights()
    assert (name, tensor.shape, tensor.dtype) == ("lm_head.weight", (6, 512), torch.float32)
    np.testing.assert_array_equal(tensor.numpy(), gguf.dequantize(raw, kind))


def test_config_fields(tmp_path):
    model = small_model("qwen3")
    more = {f"tokenizer.ggml.{name}_token_id": value for name, value in [("bos", 7), ("eos", 8), ("eot", 9)]}
    write_model(tmp_path / "m.gguf", model, "qwen3", **more)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    config = checkpoint.config()
    assert isinstance(config, Qwen3Config)
    assert config.architectures == ["Qwen3ForCausalLM"]
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "attention_bias")
    assert {name: getattr(config, name) for name in same} == {name: getattr(model.config, name) for name in same}
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (7, [8, 9], None)
    assert checkpoint.eos_token_ids() == [8, 9]
    assert checkpoint.tokenizer() is None


def test_llama_with_biases(tmp_path):
    model = small_model("llama", attention_bias=True, mlp_bias=True)
    write_model(tmp_path / "m.gguf", model, "llama")
    loaded = model_of(GGUFCheckpoint(tmp_path / "m.gguf"))
    assert (loaded.config.attention_bias, loaded.config.mlp_bias) == (True, True)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 2.0, "original_context_length": 256, "yarn_beta_fast": 16.0, "finetuned": True},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, scaling):
    model = small_model("llama", rope_scaling=dict(scaling))
    write_model(tmp_path / "m.gguf", model, "llama", **{f"llama.rope.scaling.{k}": v for k, v in metadata.items()})
    loaded = model_of(GGUFCheckpoint(tmp_path / "m.gguf"))
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(small_model("llama")), logits(model), rtol=1e-3)


def write_rope_factors(path: Path, model, factors: np.ndarray) -> None:
    write_model(path, model, "llama")
    tensors = {t.name: (np.array(t.data), t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    tensors["rope_freqs.weight"] = (factors.astype(np.float32), Kind.F32)
    write_gguf(path, "llama", metadata_of(model, "llama"), tensors)


def test_llama3_rope_scaling_is_recognised_by_its_factors(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    model = small_model("llama", rope_theta=500000.0, rope_scaling=dict(scaling), max_position_embeddings=131072)
    scaled = model.model.rotary_emb.inv_freq.double()
    plain = 1 / 500000.0 ** (torch.arange(0, 16, 2).double() / 16)
    path = tmp_path / "m.gguf"
    write_rope_factors(path, model, (plain / scaled).numpy())
    with pytest.raises(ValueError, match=r"rope_freqs\.weight are not those of a known"):  # they are for another theta
        GGUFCheckpoint(path).config()
    content = path.read_bytes()
    assert content.count(np.float32(5000).tobytes()) == 1
    path.write_bytes(content.replace(np.float32(5000).tobytes(), np.float32(500000).tobytes()))
    loaded = model_of(GGUFCheckpoint(path))
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert "rope_freqs.weight" not in GGUFCheckpoint(path).names()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.rope.scaling.type", "longrope", "rope scaling 'longrope' is not supported"),
        ("llama.expert_count", 8, r"'llama.expert_count' = 8"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count 8 unlike head size 16"),
        ("llama.attention.head_count_kv", [2, 1], "head_count_kv' should be one int"),
        ("llama.block_count", "two", "block_count' should be one int, is two"),
        ("llama.context_length", 0, "context_length' must be positive, is 0"),
    ],
)
def test_settings_that_cannot_be_represented(tmp_path, key, value, message):
    write_model(tmp_path / "m.gguf", small_model("llama"), "llama", **{key: value})
    with pytest.raises(ValueError, match=message):
        GGUFCheckpoint(tmp_path / "m.gguf").config()


def test_missing_metadata_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", {}, {"token_embd.weight": (np.zeros((3, 32), np.float32), Kind.F32)})
    with pytest.raises(ValueError, match=r"m\.gguf: metadata 'llama\.embedding_length' is missing"):
        GGUFCheckpoint(tmp_path / "m.gguf").config()


def test_unknown_architecture(tmp_path):
    write_gguf(tmp_path / "m.gguf", "mamba", {}, {})
    with pytest.raises(ValueError, match="architecture 'mamba' is not supported, only llama, qwen2, qwen3"):
        GGUFCheckpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_q.scale", "attn_q.weight", "x"])
def test_unknown_tensor(tmp_path, name):
    write_gguf(tmp_path / "m.gguf", "llama", {}, {name: (np.zeros((2, 2), np.float32), Kind.F32)})
    with pytest.raises(ValueError, match=f"tensor '{name}' is not known in a llama model"):
        next(GGUFCheckpoint(tmp_path / "m.gguf").weights())


def test_type_that_cannot_be_dequantised(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", {}, {"output.weight": (np.zeros((2, 2), np.int16), Kind.I16)})
    with pytest.raises(ValueError, match=r"'output\.weight' is of type I16, which cannot be dequantised"):
        next(GGUFCheckpoint(tmp_path / "m.gguf").weights())


def test_truncated_at_any_place(small_file, tmp_path):
    content = small_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, *range(4, 2600, 37), len(content) // 2, len(content) - 64]:
        cut.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf: not a complete, valid GGUF file: \w"):
            GGUFCheckpoint(cut)


def test_truncation_says_what_is_missing(small_file):
    content = small_file.read_bytes()
    small_file.write_bytes(content[:-64])
    with pytest.raises(ValueError, match=rf"tensor '\S+' ends at byte {len(content)}, the file already at"):
        GGUFCheckpoint(small_file)


def test_damaged_headers_are_refused_or_read_but_never_crash(small_file, tmp_path):
    content = small_file.read_bytes()[:2000]
    whole = small_file.read_bytes()
    random.seed(1)
    damaged, refused = tmp_path / "damaged.gguf", 0
    for _ in range(300):
        position = random.randrange(len(content))
        damaged.write_bytes(whole[:position] + random.randbytes(random.choice([1, 8])) + whole[position + 8 :])
        try:
            GGUFCheckpoint(damaged)
        except ValueError as error:
            assert str(damaged) in str(error)  # noqa: PT017 - most but not all damage is found
            refused += 1
    assert refused > 150


def test_huge_array_is_refused_at_once(small_file):
    key = b"tokenizer.ggml.token_type"
    write_gguf(small_file, "llama", {key.decode(): [1, 2, 3]}, {})
    content = small_file.read_bytes()
    count = content.index(key) + len(key) + 8
    small_file.write_bytes(content[:count] + (2**60).to_bytes(8, "little") + content[count + 8 :])
    with pytest.raises(ValueError, match="goes on past the end of the file"):
        GGUFCheckpoint(small_file)


def test_other_files(tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match=r"other\.gguf: .* it starts with"):
        GGUFCheckpoint(other)
    other.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    with pytest.raises(ValueError, match="big-endian"):
        GGUFCheckpoint(other)


def test_default_model():
    """What it answers is in tests/models/test_smollm2.py."""
    checkpoint = GGUFCheckpoint(default_model_path())
    config = checkpoint.config()
    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size, config.head_dim) == (49152, 30, 576, 64)
    assert (config.tie_word_embeddings, config.max_position_embeddings) == (True, 8192)
    assert (len(checkpoint.names()), checkpoint.eos_token_ids()) == (272, [2])
