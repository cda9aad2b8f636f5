"""The embedded default model, end to end: its own text against transformers' greedy output."""

import pytest
import torch
from transformers import LlamaForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.utils.default_model import default_model_path
from nanovllm.utils.gguf import GGUFCheckpoint
from tests.helpers import reference_choices

CHATS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Count from 1 to 12, separated by commas.",
    "Translate 'good morning' into Spanish, German and Japanese.",
    "Write a Python function that returns the square of 27.",
]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def path():
    return default_model_path()


@pytest.fixture(scope="module")
def reference(path):
    checkpoint = GGUFCheckpoint(path)
    model = LlamaForCausalLM(checkpoint.config()).float().eval()
    missing = model.load_state_dict(dict(checkpoint.weights()), strict=False).missing_keys
    assert missing == ["lm_head.weight"]
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def llm(path):
    options = {"dtype": "float32", "num_kvcache_blocks": 100}  # bfloat16 where there is AMX; a pool that is soon there
    with LLM(path, device="cpu", **options) as engine:
        yield engine


def test_five_chats_equal_transformers(llm, reference):
    talks = [[{"role": "user", "content": text}] for text in CHATS]
    outs = llm.chat(talks, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False)
    for talk, out in zip(talks, outs, strict=True):
        prompt = llm.tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        assert out["prompt_token_ids"] == llm.tokenizer.encode(prompt, add_special_tokens=False)
        assert len(out["token_ids"]) == NUM_TOKENS
        assert out["token_ids"] == reference_choices(reference, out["prompt_token_ids"], out["token_ids"])
        assert out["text"] == llm.tokenizer.decode(out["token_ids"], skip_special_tokens=True)


def test_it_answers_and_stops(llm):
    out = llm.chat([{"role": "user", "content": CHATS[0]}], SamplingParams(temperature=0), use_tqdm=False)[0]
    assert out["text"] == "The capital of France is Paris."
    assert out["finish_reason"] == "stop"
    assert out["token_ids"][-1] == llm.tokenizer.eos_token_id
    assert "<|im_end|>" not in out["text"]


def test_logits_equal_transformers(llm, reference):
    from tests.helpers import engine_logits

    prompt = llm.tokenizer.encode("The 3 largest rivers of Europe, by length: 1)")
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(engine_logits(llm, prompt), expected, rtol=1e-3, atol=2e-3)
