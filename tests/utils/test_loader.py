"""Checkpoints on disk: single and sharded files, and every way in which they can be wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from tests.helpers import engine_logits, save_random_model, small_config


@pytest.fixture
def folder(tmp_path):
    save_random_model(tmp_path, small_config("qwen3", num_hidden_layers=1))
    return tmp_path


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def expect_refusal(folder, message):
    with pytest.raises(ValueError, match=message):
        LLM(folder, device="cpu")


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_checkpoint_gives_the_same_logits(tied, tmp_path):
    reference = save_random_model(tmp_path, small_config("qwen2", tie_word_embeddings=tied), max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with LLM(tmp_path, device="cpu") as llm, torch.inference_mode():
        expected = reference(torch.tensor([[1, 2, 3]])).logits[0]
        torch.testing.assert_close(engine_logits(llm, [1, 2, 3]), expected, rtol=1e-4, atol=1e-4)


def test_missing_tensor_is_named(folder):
    rewrite(folder, lambda t: t.pop("model.layers.0.self_attn.k_proj.weight"))
    expect_refusal(folder, r"1 of 14 tensors are missing: model\.layers\.0\.self_attn\.k_proj\.weight")


def test_surplus_tensor_is_named(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    expect_refusal(folder, r"'model\.layers\.0\.self_attn\.q_proj\.bias' \[64\] does not belong to this model")


def test_misshapen_tensor_is_named(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(63)}))
    expect_refusal(folder, r"'model\.norm\.weight' has shape \[63\], the config asks for \[64\]")


def test_tensor_given_twice_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "b.safetensors")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"other": "b.safetensors"}
    weight_map["model.norm.weight"] = "b.safetensors"
    del weight_map["other"]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expect_refusal(folder, r"tensor 'model\.norm\.weight' is there twice")


def test_head_of_a_tied_model_and_rotary_tables_are_redundant(tmp_path):
    reference = save_random_model(tmp_path, small_config("llama", tie_word_embeddings=True))
    rewrite(
        tmp_path,
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
            }
        ),
    )
    with LLM(tmp_path, device="cpu") as llm, torch.inference_mode():
        expected = reference(torch.tensor([[1, 2, 3]])).logits[0]
        torch.testing.assert_close(engine_logits(llm, [1, 2, 3]), expected, rtol=1e-4, atol=1e-4)


def test_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path):
    save_random_model(tmp_path, small_config("llama", tie_word_embeddings=True))
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    expect_refusal(tmp_path, r"ties 'lm_head\.weight' to the embedding, but the checkpoint's differs")


def test_quantised_tensors_are_refused(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    expect_refusal(folder, r"'model\.norm\.weight' has dtype torch\.int8; quantised weights are not supported")


def test_truncated_file_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    expect_refusal(folder, r"model\.safetensors: not a valid safetensors file")
    file.write_bytes(b"not a header")
    expect_refusal(folder, r"model\.safetensors: not a valid safetensors file")


def test_index_that_misses_shards_or_leads_outside_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors", "y": "a.safetensors"}}))
    expect_refusal(folder, r"1 of 2 shards are missing: gone\.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    expect_refusal(folder, r"shard '\.\./a\.safetensors' is not a file name inside the folder")
    index.write_text("{")
    expect_refusal(folder, "not a valid index of safetensors shards")
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    expect_refusal(folder, "tensor 'x' is in the index but not in the shard")


def test_folder_without_weights_or_config_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes(b"")
    expect_refusal(folder, r"expected model\.safetensors or .* found a\.safetensors, b\.safetensors")
    (folder / "config.json").write_text("[]")
    expect_refusal(folder, r"config\.json: not a JSON object")
    (folder / "config.json").write_text("{")
    expect_refusal(folder, r"config\.json: not valid JSON")
    (folder / "config.json").unlink()
    expect_refusal(folder, r"no config\.json in the folder")


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    expect_refusal(folder, "found no safetensors file")
