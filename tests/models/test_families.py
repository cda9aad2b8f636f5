"""Each family against transformers: logits and greedy tokens of small random models in float32."""

from functools import partial

import pytest
import torch
import transformers
from transformers.models.gemma3 import modeling_gemma3

from nanovllm import LLM, SamplingParams
from tests.helpers import (
    CONFIGS,
    engine_logits,
    random_prompt,
    reference_choices,
    reference_greedy,
    save_random_model,
    small_config,
)


def longrope(rotary_dim):
    pairs = range(rotary_dim // 2)
    factors = {"short_factor": [1 + 0.1 * i for i in pairs], "long_factor": [1.5**i for i in pairs]}
    return {"type": "longrope", **factors}


GEMMA3_ATTENTION = modeling_gemma3.eager_attention_forward
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
    "gemma3-soft-caps": (
        "gemma3",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 33,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 32}),
    "mistral-window-of-two": ("mistral", {"sliding_window": 2}),
    "olmo2": ("olmo2", {}),
    "olmo2-gqa4-bias": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 40,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 1.2,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi4-partial-rotation": ("phi3", {"partial_rotary_factor": 0.75, "num_key_value_heads": 1, "sliding_window": 60}),
    "phi4-longrope": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 200,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "rope_scaling": longrope(12),
        },
    ),
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


def family_config(name, **more):
    family, changes = SHAPES[name]
    if CONFIGS[family] is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return small_config(family, **{**changes, **more})


@pytest.fixture
def save_reference(tmp_path, monkeypatch):
    """`save_random_model` of a config.

    Transformers' Gemma 3 reads `attn_logit_softcapping`, and its plain attention function can cap, but the one does not
    hand it to the other. Here it does.
    """

    def save(config):
        cap = getattr(config, "attn_logit_softcapping", None)
        if cap is not None:
            config._attn_implementation = "eager"
            monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", partial(GEMMA3_ATTENTION, softcap=cap))
        return save_random_model(tmp_path, config)

    return save


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_greedy_tokens_equal_transformers(name, tmp_path, save_reference):
    reference = save_reference(family_config(name))
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(tmp_path, device="cpu", enable_prefix_caching=False) as llm:
        for prompt in prompts:
            with torch.inference_mode():
                expected = reference(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(engine_logits(llm, prompt), expected, rtol=1e-4, atol=1e-4)
        batched = [out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)]
        assert [len(tokens) for tokens in batched] == [64] * len(prompts)
        choices = [reference_choices(reference, *both) for both in zip(prompts, batched, strict=True)]
        assert batched == choices
        assert llm.generate(prompts[1], params, use_tqdm=False)[0]["token_ids"] == batched[1]


GPU_SHAPES = (
    "gemma3",
    "gemma3-soft-caps",
    "mistral-window",
    "olmo2",
    "olmo3",
    "phi4-partial-rotation",
    "phi4-longrope",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernels natively")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
        ("gemma3-soft-caps", {}),
        ("olmo2", {"num_hidden_layers": 1}),
        ("phi4-longrope", {"num_hidden_layers": 1, "original_max_position_embeddings": 32}),
    ],
)
def test_kernels_in_the_interpreter(name, changes, tmp_path, save_reference):
    """Mixed steps, a chunk and decodes past the window, with norms that are not Llama's or Qwen's."""
    reference = save_reference(family_config(name, **changes))
    prompts = [random_prompt(length, 5) for length in (3, 38)]
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 2, "kvcache_block_size": 16, "num_kvcache_blocks": 10}
    with LLM(tmp_path, device="cpu", attention_backend="triton", max_model_len=80, **options) as llm:
        outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert [out["token_ids"] for out in outs] == [reference_greedy(reference, prompt, 3) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_SHAPES)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_gpu_gives_the_tokens_of_the_cpu(name, eager, tmp_path, save_reference):
    """In float32 with TritonAttention, beside transformers on the CPU; heads of 64."""
    sizes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4}
    if name == "phi4-longrope":
        sizes["rope_scaling"] = longrope(48)
    reference = save_reference(family_config(name, **sizes))
    prompts = [random_prompt(length, length) for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(tmp_path, dtype="float32", enforce_eager=eager, max_num_seqs=8, num_kvcache_blocks=24) as llm:
        assert (llm.model_runner.graphs is None) == eager
        outs = llm.generate(prompts, params, use_tqdm=False)
    assert [out["token_ids"] for out in outs] == [reference_greedy(reference, prompt, 64) for prompt in prompts]


def test_each_soft_cap_counts_in_logits_and_in_what_is_drawn_from_them(tmp_path, save_reference):
    """Each alone, both, neither: four results, of which log-probabilities are as capped as the logits."""
    prompt, seen = random_prompt(40, 1), []
    params = SamplingParams(temperature=1, max_tokens=1, logprobs=20, seed=3)
    for caps in ((None, None), (1.5, None), (None, 4.0), (1.5, 4.0)):
        config = family_config("gemma3-soft-caps", attn_logit_softcapping=caps[0], final_logit_softcapping=caps[1])
        reference = save_reference(config)
        with LLM(tmp_path, device="cpu") as llm, torch.inference_mode():
            logits = engine_logits(llm, prompt)
            expected = reference(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            drawn = llm.generate(prompt, params, use_tqdm=False)[0]["logprobs"][0]
        ids, values = torch.tensor(list(drawn)), torch.tensor([entry["logprob"] for entry in drawn.values()])
        torch.testing.assert_close(values, expected[-1].log_softmax(-1)[ids], rtol=1e-4, atol=1e-4)
        assert caps[1] is None or float(logits.abs().max()) <= 4
        assert all(float((logits - other).abs().max()) > 0.01 for other in seen)
        seen.append(logits)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
            "beta_fast": 4.0,
            "truncate": False,
        },
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "dynamic", "yarn", "yarn-all-settings", "llama3"],
)
def test_scaled_rope_up_to_the_last_position(scaling, tmp_path):
    config = small_config("qwen3", max_position_embeddings=256, rope_scaling=scaling)
    reference = save_random_model(tmp_path, config)
    prompt = random_prompt(200, 1)
    with LLM(tmp_path, device="cpu") as llm, torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(engine_logits(llm, prompt), expected, rtol=1e-4, atol=1e-4)
        tokens = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=56, ignore_eos=True), use_tqdm=False)
        assert tokens[0]["token_ids"] == reference_greedy(reference, prompt, 56)


def test_longrope_by_the_length_that_a_sequence_may_reach(tmp_path):
    """Short and long tables side by side in steps, chunks and prefix cache; in the second round, from the cache."""
    reference = save_random_model(tmp_path, family_config("phi4-longrope", original_max_position_embeddings=64))
    prompt = random_prompt(150, 2)
    short, long, crossing = [(1, 64), (40, 25)], [(65, 1), (65, 40), (150, 24)], [(40, 26), (40, 100)]
    cases = short + long + crossing
    params = [SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True) for _, max_tokens in cases]
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 200}
    with LLM(tmp_path, device="cpu", **options) as llm:
        for _ in range(2):
            outs = llm.generate([prompt[:length] for length, _ in cases], params, use_tqdm=False)
            tokens = [out["token_ids"] for out in outs]
            assert tokens[: len(short + long)] == [reference_greedy(reference, prompt[:n], m) for n, m in short + long]
            for (length, _), completion in zip(crossing, tokens[-len(crossing) :], strict=True):
                assert completion == reference_choices(reference, prompt[:length], completion)
        assert llm.scheduler.counters.prefix_hit_tokens > 0
    assert tokens[5][:25] != tokens[1], "the long table has to show"
    with LLM(tmp_path, device="cpu", max_model_len=65) as llm:
        assert llm.model_runner.rows.rotary_offsets is None
        assert llm.generate(prompt[:40], params[-1], use_tqdm=False)[0]["token_ids"] == tokens[1]


def test_lengths_at_which_the_rotation_would_change_are_refused(tmp_path):
    small_config("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"of 1024 tokens .*'dynamic' change with each sequence's length"):
        LLM(tmp_path, device="cpu", load_format="dummy", max_model_len=1025)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75 is not supported"),
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
        (
            "qwen3",
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping 50.0 in the model's config is not supported",
        ),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar .* must be a number above 0, got 0"),
        ("gemma3", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar .* must be a number above 0, got -4"),
        ("gemma3", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping .* must be a number above 0, got 0.0"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(family, changes, message, tmp_path):
    config = small_config(family)
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
