"""What meets in one request or one engine: the parts are tested where they are."""

import pytest

from nanovllm import LLM, SamplingParams
from tests.helpers import DEVICE, byte_tokenizer, save_random_model, save_tokenizer, small_config

ON = {"device": DEVICE, "dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 100, "max_num_seqs": 4}
END = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    save_random_model(path, small_config("llama", vocab_size=258, eos_token_id=END, max_position_embeddings=256))
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def llm(request, folder):
    with LLM(folder, **ON, overlap=request.param) as engine:
        yield engine
        engine.scheduler.block_manager.check_integrity([])


def test_abort_of_a_request_whose_first_completion_is_done(llm):
    """Its id is the first completion's."""
    for seed in range(100):
        params = SamplingParams(n=2, seed=seed, max_tokens=60, logit_bias={END: 6.0})
        seq_id = llm.add_request([5, 6, 7], params)
        while seq_id in llm._requests:
            llm.step()
        if llm._requests:
            break
        llm.step_outputs()
    assert llm.abort(seq_id)
    assert not llm.abort(seq_id)
    assert llm.is_finished()
    assert llm.step_outputs() == []


def test_bad_words_that_may_leave_none_of_the_allowed_tokens_are_refused(llm):
    a, b, c = llm.tokenizer.encode("abc", add_special_tokens=False)
    options = {"allowed_token_ids": [a, b], "bad_words": ["aa", "ab"], "ignore_eos": True}
    with pytest.raises(ValueError, match=rf"prompt 0: bad_words leave no token of .* to generate after \[{a}\]"):
        llm.generate([5], SamplingParams(**options, max_tokens=20), use_tqdm=False)
    for fine in ({"max_tokens": 1}, {"allowed_token_ids": [a, b, c], "max_tokens": 40}):
        (out,) = llm.generate([5], SamplingParams(**{**options, **fine}), use_tqdm=False)
        assert set(out["token_ids"]) <= {a, b, c}


def test_bad_word_of_which_only_the_form_after_a_space_is_outside_the_vocabulary(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([" foo"])
    tokenizer.save_pretrained(tmp_path)
    save_random_model(tmp_path, small_config("llama", vocab_size=258))
    with LLM(tmp_path, **ON) as llm:
        with pytest.raises(ValueError, match="prompt 0: token id 258 of bad word ' foo' is outside the vocabulary"):
            llm.generate([5], SamplingParams(bad_words=["foo"]), use_tqdm=False)
        assert llm.is_finished()


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_log_probabilities_than_the_vocabulary_has(tmp_path, name):
    save_random_model(tmp_path, small_config("llama", vocab_size=12))
    params = SamplingParams(max_tokens=2, ignore_eos=True, **{name: 20})
    with LLM(tmp_path, **ON) as llm:
        (out,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert [len(entry or {}) for entry in out[name][-2:]] == [12, 12]


def test_a_stream_has_the_log_probabilities_that_generate_has(llm):
    """Of several completions, the first brings those of the prompt."""
    prompts, params = [[5, 6, 7], [9]], SamplingParams(seed=3, n=2, max_tokens=9, logprobs=2, prompt_logprobs=1)
    outs = llm.generate(prompts, params, use_tqdm=False)
    streamed = {(i, k): [] for i in range(2) for k in range(2)}
    of_prompts = {}
    for new in llm.stream(prompts, params):
        assert len(new.logprobs) == len(new.token_ids)
        streamed[new.index, new.completion] += new.logprobs
        if new.prompt_logprobs is not None:
            assert of_prompts.setdefault((new.index, new.completion), new.prompt_logprobs) is new.prompt_logprobs
    for (i, k), entries in streamed.items():
        expected = outs[i]["completions"][k]["logprobs"]
        assert [list(entry) for entry in entries] == [list(entry) for entry in expected]
    assert {place: len(entries) for place, entries in of_prompts.items()} == {(0, 0): 3, (1, 0): 1}
    assert [list(entry) for entry in of_prompts[0, 0][1:]] == [list(entry) for entry in outs[0]["prompt_logprobs"][1:]]
    assert all(new.logprobs is None for new in llm.stream([5], SamplingParams(max_tokens=2)))


def test_scores_need_no_texts(llm, monkeypatch):
    """They fail with no tokenizer's decoder, and take no time for it."""
    expected = llm.score([[5, 6], [7, 8, 9]], use_tqdm=False)
    monkeypatch.setattr(llm.tokenizer, "decode", lambda *args, **options: 1 / 0)
    assert llm.score([[5, 6], [7, 8, 9]], use_tqdm=False) == expected
    params = SamplingParams(max_tokens=1, logprobs=1, detokenize=False, ignore_eos=True)
    (out,) = llm.generate([5], params, use_tqdm=False)
    assert {value["token"] for value in out["logprobs"][0].values()} == {None}
