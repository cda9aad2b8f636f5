"""Each family against transformers: logits and greedy tokens of small random models in float32."""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.helpers import engine_logits, random_prompt, reference_greedy, save_random_model, small_config

LENGTHS = (1, 15, 16, 17, 255, 256, 257)
SHAPES = {
    "llama-mha": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}),
    "llama-gqa3-tied": ("llama", {"num_attention_heads": 6, "hidden_size": 96, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 33,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 32}),
    "mistral-window-of-two": ("mistral", {"sliding_window": 2}),
    "olmo2": ("olmo2", {}),
    "olmo2-gqa4-bias": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-window": ("phi3", {"sliding_window": 47, "num_key_value_heads": 4}),
    "qwen2-window-in-some-layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3-window-in-all-layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 255, "max_window_layers": 0},
    ),
    "qwen2-gqa7": ("qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 7 * 16}),
    "qwen2-gqa2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-head80": ("qwen3", {"head_dim": 80}),
    "qwen3-head96-gqa1-tied": ("qwen3", {"head_dim": 96, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
}


def family_config(name):
    family, changes = SHAPES[name]
    return small_config(family, **changes)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_greedy_tokens_equal_transformers(name, tmp_path):
    reference = save_random_model(tmp_path, family_config(name))
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(tmp_path, device="cpu", enable_prefix_caching=False) as llm:
        for prompt in prompts:
            with torch.inference_mode():
                expected = reference(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(engine_logits(llm, prompt), expected, rtol=1e-4, atol=1e-4)
        expected_tokens = [reference_greedy(reference, prompt, 64) for prompt in prompts]
        batched = llm.generate(prompts, params, use_tqdm=False)
        assert [out["token_ids"] for out in batched] == expected_tokens
        for prompt, tokens in zip(prompts, expected_tokens, strict=True):
            assert llm.generate(prompt, params, use_tqdm=False)[0]["token_ids"] == tokens


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rope_beyond_the_original_context(kind, tmp_path):
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    reference = save_random_model(tmp_path, small_config("qwen3", max_position_embeddings=256, rope_scaling=scaling))
    prompt = random_prompt(200, 1)
    with LLM(tmp_path, device="cpu") as llm, torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(engine_logits(llm, prompt), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(changes, message, tmp_path):
    small_config("llama", **changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, device="cpu", load_format="dummy")


@pytest.mark.parametrize("window", [16, 40, 41])
def test_window_edges_across_chunks_and_the_prefix_cache(window, tmp_path):
    """Prompts around the window's length, in chunks and one step, alone and after a prefix hit."""
    reference = save_random_model(tmp_path, small_config("mistral", sliding_window=window))
    prompts = [random_prompt(length, 3) for length in (window - 1, window, window + 1, 2 * window + 5, 100)]
    expected = [reference_greedy(reference, prompt, 24) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for chunk in (1024, 17):
        with LLM(tmp_path, device="cpu", max_num_batched_tokens=chunk, max_num_seqs=8) as llm:
            for _ in range(2):
                outs = llm.generate(prompts, params, use_tqdm=False)
                assert [out["token_ids"] for out in outs] == expected


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window in the model's config must be 1 or more, got 0"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types in the model's config must be 2",
        ),
        (
            "llama",
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping 30.0 in the model's config is not supported",
        ),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75 is not supported"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(family, changes, message, tmp_path):
    config = small_config(family, **(changes if family == "phi3" else {}))
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, device="cpu", load_format="dummy")


def test_other_architectures_are_refused_with_the_list_of_supported_ones(tmp_path):
    config = small_config("llama")
    config.architectures = ["GPTBigCodeForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"GPTBigCodeForCausalLM.*LlamaForCausalLM, MistralForCausalLM, .*Qwen3ForCausalLM"
    ):
        LLM(tmp_path, device="cpu", load_format="dummy")
