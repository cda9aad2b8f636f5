"""Bad words against a plain loop over transformers' logits, with the last token unknown to the host and known."""

import string

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.helpers import byte_tokenizer, random_prompt, save_random_model, save_tokenizer, small_config

NUM_TOKENS = 30
LETTERS = [byte_tokenizer().encode(c, add_special_tokens=False)[0] for c in string.ascii_letters]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    return folder, save_random_model(folder, small_config("qwen3", vocab_size=258))


@torch.inference_mode()
def greedy_without(reference, prompt, words):
    """Greedy completion in letters, without the last token of each of `words` (ids) where the others were drawn."""
    drawn = []
    while len(drawn) < NUM_TOKENS:
        logits = torch.full((258,), float("-inf"))
        logits[LETTERS] = reference(torch.tensor([prompt + drawn])).logits[0, -1, LETTERS]
        for *before, last in words:
            if drawn[len(drawn) - len(before) :] == before and len(drawn) >= len(before):
                logits[last] = float("-inf")
        drawn.append(int(logits.argmax()))
    return drawn


@pytest.mark.parametrize("overlap", [False, True])
def test_words_made_of_what_would_be_generated_never_appear(model, overlap):
    """Of one, two and three tokens, taken from the free completion, so that every rule takes hold somewhere."""
    folder, reference = model
    tokenizer = byte_tokenizer()
    prompts = [random_prompt(5 + i, i) for i in range(6)]
    free = [greedy_without(reference, prompt, []) for prompt in prompts]
    texts, params, expected = [], [], []
    for i, (prompt, ids) in enumerate(zip(prompts, free, strict=True)):
        length = 1 + i % 3
        words = [ids[2 : 2 + length], ids[9 : 9 + length]] if i < 5 else []
        texts.append([tokenizer.decode(word) for word in words])
        spaced = [tokenizer.encode(" " + text, add_special_tokens=False) for text in texts[-1]]
        expected.append(greedy_without(reference, prompt, words + spaced))
        params.append(
            SamplingParams(
                temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=LETTERS, bad_words=texts[-1]
            )
        )
    with LLM(folder, device="cpu", overlap=overlap, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        outs = [out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)]
    assert outs == expected
    assert outs[5] == free[5]
    assert all(out != ids for out, ids in zip(outs[:5], free, strict=False))


def test_bad_values_are_refused(tmp_path):
    for value, error in (("a", TypeError), ([1], TypeError), ([""], ValueError)):
        with pytest.raises(error, match="bad_words must"):
            SamplingParams(bad_words=value)
    save_random_model(tmp_path, small_config("qwen3"))
    with LLM(tmp_path, device="cpu") as llm, pytest.raises(ValueError, match="prompt 0: the model came without a tok"):
        llm.generate([[1]], SamplingParams(bad_words=["a"]), use_tqdm=False)
