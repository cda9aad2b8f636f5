"""A model over several processes gives the tokens that one gives, whatever is asked of it."""

import pytest

from nanovllm import LLM, SamplingParams
from tests.helpers import save_random_model, save_tokenizer, small_config

PROMPTS = [[7, 8, 9] * 9, [5] * 40, [3, 4], [11, 12, 13, 14] * 12, [20], [7, 8, 9] * 9 + [1]]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
REQUESTS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True),
    "filtered": SamplingParams(temperature=1.1, top_k=20, top_p=0.9, min_p=0.01, max_tokens=20, ignore_eos=True),
    "penalised": SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
                                max_tokens=20, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, logprobs=3, max_tokens=12, ignore_eos=True),
    "prompt logprobs": SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=8, ignore_eos=True),
    "edited": SamplingParams(temperature=0.5, logit_bias={65: 3.0}, bad_words=["ab"], min_tokens=3, max_tokens=20),
    "allowed": SamplingParams(temperature=1, allowed_token_ids=[60, 70, 80, 250], max_tokens=9, ignore_eos=True),
    "several": SamplingParams(temperature=1, n=3, max_tokens=9, ignore_eos=True),
    "stop": SamplingParams(temperature=1, seed=1, stop=["e", "t"], max_tokens=40),
    "grammar": SamplingParams(temperature=1, seed=5, regex="[a-f]{4,9}", max_tokens=12),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    save_random_model(path, small_config("qwen3", vocab_size=258, num_attention_heads=4), seed=3)
    return path


@pytest.fixture(scope="module", params=[2, 4])
def llms(request, folder):
    """The same with one rank and with several."""
    options = {"device": "cpu", "max_num_seqs": 8, "num_kvcache_blocks": 60}
    with LLM(folder, **options) as one, LLM(folder, tensor_parallel_size=request.param, **options) as several:
        yield one, several


def completions(llm, prompts, params):
    outs = llm.generate(prompts, params, use_tqdm=False)
    return [[(c["token_ids"], c["text"], c["finish_reason"]) for c in out.get("completions", [out])] for out in outs]


@pytest.mark.parametrize("kind", REQUESTS)
def test_same_completions_as_one_rank(llms, kind):
    one, several = llms
    assert completions(several, PROMPTS, REQUESTS[kind]) == completions(one, PROMPTS, REQUESTS[kind])


def test_all_kinds_together(llms):
    """Steps that have plain, edited and scored rows, prompts and decodes."""
    params = [p for kind, p in REQUESTS.items() if kind != "grammar"]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    one, several = (completions(llm, prompts, params) for llm in llms)
    assert several == one


@pytest.mark.parametrize("kind", ["logprobs", "prompt logprobs"])
def test_same_log_probabilities(llms, kind):
    one, several = (llm.generate(PROMPTS, REQUESTS[kind], use_tqdm=False) for llm in llms)
    name = kind.replace(" ", "_")
    for mine, theirs in zip(several, one, strict=True):
        assert len(mine[name]) == len(theirs[name]) > 0
        for a, b in zip(mine[name], theirs[name], strict=True):
            if b is None:
                assert a is None
                continue
            assert a.keys() == b.keys()
            for token in a:
                assert a[token]["logprob"] == pytest.approx(b[token]["logprob"], abs=1e-4)


def test_prefix_hits_are_the_same(llms):
    for llm in llms:
        llm.reset_prefix_cache()
        llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
    outs = [llm.generate([PROMPTS[3], [*PROMPTS[3], 5]], GREEDY, use_tqdm=False) for llm in llms]
    assert [out["num_cached_tokens"] for out in outs[1]] == [out["num_cached_tokens"] for out in outs[0]] == [32, 48]
    assert [out["token_ids"] for out in outs[1]] == [out["token_ids"] for out in outs[0]]


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_chunks_and_overlap(folder, overlap):
    """A pool that is too small, prompts in pieces of 16 tokens, sampled."""
    options = {"device": "cpu", "max_num_seqs": 4, "num_kvcache_blocks": 8, "max_num_batched_tokens": 16}
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True)
    with LLM(folder, **options) as one:
        expected = completions(one, PROMPTS, params)
    with LLM(folder, tensor_parallel_size=2, overlap=overlap, **options) as several:
        assert completions(several, PROMPTS, params) == expected
        assert several.stats()["preemptions"] > 0
        several.scheduler.block_manager.check_integrity([])
