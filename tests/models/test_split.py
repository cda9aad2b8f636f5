"""Models split over ranks: every family gives the logits that it gives alone, and what does not divide is refused."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from nanovllm.config import Config
from nanovllm.engine.build import build_rank
from nanovllm.layers.parallel import Ranks
from nanovllm.models.registry import model_spec
from nanovllm.models.split import rank_spec
from nanovllm.utils.checkpoint import open_checkpoint
from nanovllm.utils.loader import cuts, destinations
from tests.helpers import CONFIGS, in_ranks, random_prompt, runner_logits, save_random_model, small_config
from tests.models.test_families import SHAPES
from tests.utils.test_gguf import Kind, small_model, write_model

MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 2}
CASES = {
    **SHAPES,
    "qwen3-moe": ("qwen3_moe", MOE),
    "qwen3-vocabulary-of-4-and-3": ("qwen3", {"vocab_size": 7}),
    "qwen3-kv-heads-once-each": ("qwen3", {"num_key_value_heads": 4, "attention_bias": True}),
}


def build(folder, ranks, **options):
    config = Config(model=folder, device="cpu", num_kvcache_blocks=20, **options)
    checkpoint = open_checkpoint(folder)
    parts = build_rank(config, checkpoint, model_spec(checkpoint.config()), ranks)
    return parts, parts.runner(20)


@pytest.fixture
def unpacked(monkeypatch):
    """Weights stay as they were loaded."""
    monkeypatch.setattr("nanovllm.layers.linear.can_pack", lambda weight: False)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_together_give_the_logits_of_one(case, size, tmp_path):
    family, changes = CASES[case]
    if CONFIGS[family] is None:
        pytest.skip("this transformers does not have the family")
    save_random_model(tmp_path, small_config(family, **changes))
    spec = model_spec(open_checkpoint(tmp_path).config())
    if spec.num_q_heads % size:  # the only thing in these shapes that does not divide
        with pytest.raises(ValueError, match="cannot split the model's num_attention_heads"):
            rank_spec(spec, size)
        return
    prompt = [token % spec.vocab_size for token in random_prompt(70, 1)]
    expected = runner_logits(build(tmp_path, Ranks())[1], prompt)
    logits, *others = in_ranks(size, lambda ranks: runner_logits(build(tmp_path, ranks)[1], prompt))
    assert others == [None] * (size - 1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_ranks_of_a_gguf_file(kind, tmp_path):
    """Quantised rows are cut once they are read; llama's are put in order before."""
    model = small_model("llama", num_attention_heads=4, num_key_value_heads=2)
    write_model(tmp_path / "model.gguf", model, "llama", kind)
    expected = runner_logits(build(tmp_path, Ranks(), dtype="float32")[1], [5, 6, 7])
    logits = in_ranks(2, lambda ranks: runner_logits(build(tmp_path, ranks, dtype="float32")[1], [5, 6, 7]))[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_fused_tensors_of_experts_are_cut(tmp_path, unpacked):
    """As some checkpoints hold them: rank 1's slices, by value."""
    config = small_config("qwen3_moe", **MOE)
    save_random_model(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    parts, _ = build(tmp_path, Ranks(1, 2), load_format="dummy")
    fused = {"experts.gate_up_proj": (1, torch.arange(6 * 128 * 64).view(6, 128, 64)),
             "experts.down_proj": (2, torch.arange(6 * 64 * 64).view(6, 64, 64))}  # fmt: skip
    found = cuts(parts.model)
    for name, (dim, tensor) in fused.items():
        part = found[f"model.layers.1.mlp.{name}"].of(tensor)
        index = [*range(32, 64), *range(96, 128)] if dim == 1 else range(32, 64)
        assert torch.equal(part, tensor.index_select(dim, torch.tensor(list(index))))
    assert not any("layers.0.mlp.experts" in name for name in tensors)


def test_every_element_of_a_checkpoint_is_held_by_the_ranks_that_need_it(tmp_path, unpacked):
    """Views on each rank are as large as its cuts, and the ranks' cuts together are the tensors."""
    save_random_model(tmp_path, small_config("phi3", num_key_value_heads=2, sliding_window=None))
    for size in (2, 4):
        held = [build(tmp_path, Ranks(rank, size), load_format="dummy")[0].model for rank in range(size)]
        for name, tensor in load_file(tmp_path / "model.safetensors").items():
            counted = torch.zeros_like(tensor, dtype=torch.int32)
            for model in held:
                cut = cuts(model).get(name)
                part = counted if cut is None else cut.of(counted)
                assert part.shape == destinations(model)[name].shape
                for start, stop in cut.pieces if cut else [(0, len(tensor))]:
                    counted.narrow(cut.dim if cut else 0, start, stop - start).add_(1)
            most = size if cuts(held[0]).get(name) is None else (2 if size == 4 and "qkv" in name else 1)
            assert counted.min() >= 1
            assert counted.max() == most


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_attention_heads": 6}, 4, r"cannot split the model's num_attention_heads 6; sizes that can: 1, 2, 3, 6$"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            2,
            r"cannot split the model's num_key_value_heads 3; sizes that can: 1, 3, 6$",
        ),
        (
            {"intermediate_size": 90},
            4,
            r"cannot split the model's intermediate_size 90; sizes that can: 1, 2, 3, 5, 6$",
        ),
        ({"vocab_size": 3}, 4, "vocab_size 3 is less than tensor_parallel_size 4"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(changes, size, message):
    with pytest.raises(ValueError, match=message):
        rank_spec(model_spec(small_config("qwen3", **changes)), size)


def test_experts_are_split_in_multiples_of_8():
    spec = model_spec(small_config("qwen3_moe", **MOE | {"decoder_sparse_step": 1, "intermediate_size": 81}))
    assert rank_spec(spec, 4).moe.intermediate_size == 16  # nothing asks for the MLP's size: no layer has one
    spec = replace(spec, moe=replace(spec.moe, intermediate_size=24))
    with pytest.raises(ValueError, match="moe_intermediate_size 24 into multiples of 8; sizes that can: 1, 3"):
        rank_spec(spec, 2)


def test_tensor_of_another_shape_than_its_cut_is_named(tmp_path):
    """Also where it has the shape of the part."""
    save_random_model(tmp_path, small_config("qwen3", intermediate_size=40))
    config = small_config("qwen3", intermediate_size=80)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"down_proj.weight' has shape \[64, 40\], the config asks for \[64, 80\]"):
        build(tmp_path, Ranks(0, 2))
