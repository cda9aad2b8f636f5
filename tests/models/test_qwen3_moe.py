"""Qwen3-MoE against transformers, and its checkpoints: expert by expert and fused, whole and broken."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from tests.helpers import (
    engine_logits,
    random_prompt,
    reference_choices,
    reference_greedy,
    save_random_model,
    small_config,
)

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True}
SHAPES = {
    "all-sparse": EXPERTS,
    "not-normalised-tied": EXPERTS | {"norm_topk_prob": False, "tie_word_embeddings": True},
    "every-second": EXPERTS | {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "some-dense": EXPERTS | {"mlp_only_layers": [1], "num_hidden_layers": 3},
    "one-expert-a-token": EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "all-experts": EXPERTS | {"num_experts": 3},
    "no-experts": EXPERTS | {"num_experts": 0},
}
LENGTHS = (1, 7, 100)


def moe_config(**changes):
    return small_config("qwen3_moe", **(EXPERTS | changes))


def save_unbalanced(folder, config):
    """A model whose first layer sends every token to expert 0 and none to expert 1."""
    model = save_random_model(folder, config)
    first = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 20
        first.post_attention_layernorm.weight[0] = 1
        first.mlp.gate.weight[:, 0] = torch.tensor([4.0, -4.0, 0, 0, 0, 0, 0, 0])
    model.save_pretrained(folder)
    return model


def check(folder, reference):
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(folder, device="cpu", enable_prefix_caching=False) as llm:
        for prompt in prompts:
            with torch.inference_mode():
                expected = reference(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(engine_logits(llm, prompt), expected, rtol=1e-4, atol=1e-4)
        batched = llm.generate(prompts, params, use_tqdm=False)
    for out, prompt in zip(batched, prompts, strict=True):
        assert len(out["token_ids"]) == 64
        assert out["token_ids"] == reference_choices(reference, prompt, out["token_ids"])


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_greedy_tokens_equal_transformers(name, tmp_path):
    check(tmp_path, save_random_model(tmp_path, small_config("qwen3_moe", **SHAPES[name])))


def test_unbalanced_routing(tmp_path):
    reference = save_unbalanced(tmp_path, moe_config())
    seen = []
    gate = reference.model.layers[0].mlp.gate
    hook = gate.register_forward_hook(lambda _, x, out: seen.append(x[0].flatten(0, -2) @ gate.weight.T))
    check(tmp_path, reference)
    hook.remove()
    order = torch.cat(seen).argsort(-1)
    assert (order[:, -1] == 0).all()
    assert (order[:, 0] == 1).all()


def test_triton_kernels_in_the_engine(tmp_path):
    reference = save_random_model(tmp_path, moe_config())
    prompts = [random_prompt(20, 1), random_prompt(2, 2)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(tmp_path, attention_backend="triton", max_num_seqs=4, enable_prefix_caching=False) as llm:
        with torch.inference_mode():
            expected = reference(torch.tensor([prompts[0]])).logits[0]
        torch.testing.assert_close(engine_logits(llm, prompts[0]), expected, rtol=1e-4, atol=1e-4)
        outs = llm.generate(prompts, params, use_tqdm=False)
    assert [out["token_ids"] for out in outs] == [reference_greedy(reference, prompt, 2) for prompt in prompts]


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fuse(tensors, layer=0):
    """Replace a layer's per-expert tensors by the two fused ones."""
    prefix = f"model.layers.{layer}.mlp.experts"

    def take(name):
        return [tensors.pop(f"{prefix}.{i}.{name}.weight") for i in range(EXPERTS["num_experts"])]

    gate_up = zip(take("gate_proj"), take("up_proj"), strict=True)
    tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in gate_up])
    tensors[f"{prefix}.down_proj"] = torch.stack(take("down_proj"))


def test_fused_checkpoint_gives_the_same_logits(tmp_path):
    reference = save_random_model(tmp_path, moe_config())
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    change_tensors(tmp_path, fuse)
    with LLM(tmp_path, device="cpu") as llm, torch.inference_mode():
        expected = reference(torch.tensor([[1, 2, 3]])).logits[0]
        torch.testing.assert_close(engine_logits(llm, [1, 2, 3]), expected, rtol=1e-4, atol=1e-4)


def fuse_and_keep_one(tensors):
    kept = tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    fuse(tensors)
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"] = kept.clone()


def drop_an_expert(tensors):
    del tensors["model.layers.1.mlp.experts.5.down_proj.weight"]


def one_expert_less(tensors):
    fuse(tensors)
    tensors["model.layers.0.mlp.experts.down_proj"] = tensors["model.layers.0.mlp.experts.down_proj"][1:].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fuse_and_keep_one, r"tensor 'model\.layers\.0\.mlp\.experts\..*' is there twice"),
        (drop_an_expert, r"1 of 69 tensors are missing: model\.layers\.1\.mlp\.experts\.5\.down_proj\.weight"),
        (one_expert_less, r"experts\.down_proj' has shape \[7, 64, 40\], the config asks for \[8, 64, 40\]"),
    ],
)
def test_broken_checkpoints_are_refused(change, message, tmp_path):
    save_random_model(tmp_path, moe_config())
    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok in the model's config must be from 1 to 8, got 9"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size in the model's config must be from 1"),
        ({"moe_intermediate_size": 36}, "moe_intermediate_size 36 in the model's config is not a multiple of 8"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step in the model's config must be from 1"),
        ({"num_experts": 2000}, "num_experts in the model's config must be from 0 to 1024, got 2000"),
    ],
)
def test_counts_that_make_no_sense_are_refused(changes, message, tmp_path):
    moe_config(**changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, device="cpu", load_format="dummy")
