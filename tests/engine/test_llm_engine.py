"""The public surface on a small random model with a byte-level tokenizer."""

import json

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.request import Request
from nanovllm.kernels.reference import gumbel_noise
from tests.helpers import reference_greedy, save_random_model, save_tokenizer, small_config

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    save_random_model(path, small_config("qwen3", vocab_size=258, max_position_embeddings=256), seed=3)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, device="cpu") as engine:
        yield engine


def idle(llm):
    assert llm.is_finished()
    llm.scheduler.block_manager.check_integrity([])
    assert not llm._requests
    return True


def test_project_script_verbatim(folder, capsys):
    """The script that defines the project (one rank)."""
    from nanovllm import LLM, SamplingParams

    llm = LLM(model=str(folder), tensor_parallel_size=1, max_num_seqs=256)
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=150)
    prompts = ["Hello, my name is", "The capital of France is", "In a world where"]
    outputs = llm.generate(prompts, sampling_params)
    for i, output in enumerate(outputs):
        print(f"Prompt {i + 1}: {prompts[i]}")
        print(f"Generated: {output['text']}\n")
    printed = capsys.readouterr().out
    assert all(f"Prompt {i + 1}: {prompt}\nGenerated: " in printed for i, prompt in enumerate(prompts))
    assert all(1 <= len(output["token_ids"]) <= 150 for output in outputs)
    llm.close()


def test_text_and_token_prompts_mixed_with_unequal_parameters(llm, reference):
    prompts = ["abc", [5, 6, 7, 8], "é"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    outs = llm.generate(prompts, params, use_tqdm=False)
    ids = [llm.tokenizer.encode("abc"), [5, 6, 7, 8], llm.tokenizer.encode("é")]
    assert [out["prompt_token_ids"] for out in outs] == ids
    for out, prompt, param in zip(outs, ids, params, strict=True):
        assert out["token_ids"] == reference_greedy(reference, prompt, param.max_tokens)
        assert out["text"] == llm.tokenizer.decode(out["token_ids"], skip_special_tokens=True)
        assert out["finish_reason"] == "length"
    assert idle(llm)


def test_single_prompts_give_a_list_of_one(llm):
    text = llm.generate("abc", GREEDY, use_tqdm=False)
    tokens = llm.generate(llm.tokenizer.encode("abc"), GREEDY, use_tqdm=False)
    array = llm.generate(np.array(llm.tokenizer.encode("abc")), GREEDY, use_tqdm=False)
    assert len(text) == 1
    assert text[0]["token_ids"] == tokens[0]["token_ids"] == array[0]["token_ids"]
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"kvcache_block_size": 32},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"num_kvcache_blocks": 9},
        {"num_kvcache_blocks": 9, "max_num_batched_tokens": 5, "max_num_seqs": 5},
        {"overlap": True},
        {"overlap": True, "num_kvcache_blocks": 9, "max_num_batched_tokens": 5, "max_num_seqs": 5},
    ],
)
def test_greedy_tokens_do_not_depend_on_caching_chunks_blocks_mates_or_preemption(folder, reference, options):
    rng = np.random.default_rng(0)
    shared = rng.integers(2, 258, 40).tolist()
    prompts = [shared + rng.integers(2, 258, n).tolist() for n in (1, 8, 9, 30)] + [[3], shared[:16], shared[:17]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(folder, device="cpu", **options) as engine:
        outs = engine.generate(prompts, params, use_tqdm=False)
        assert [out["token_ids"] for out in outs] == [reference_greedy(reference, p, 40) for p in prompts]
        again = engine.generate(prompts, params, use_tqdm=False)
        assert [out["token_ids"] for out in again] == [out["token_ids"] for out in outs]
        if not options.get("enable_prefix_caching", True):
            assert all(out["num_cached_tokens"] == 0 for out in again)
        assert idle(engine)


def test_cached_tokens_are_reported(llm):
    prompt = list(range(2, 42))
    llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0]["num_cached_tokens"] == 32
    assert llm.generate([*prompt[:20], 99], GREEDY, use_tqdm=False)[0]["num_cached_tokens"] == 16


def test_every_eos_id_of_the_generation_config_and_the_tokenizer_stops(folder, tmp_path, reference):
    prompt = [9, 10, 11]
    greedy = reference_greedy(reference, prompt, 12)
    stop_at = greedy[4]
    assert stop_at not in greedy[:4]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [200, stop_at]}))
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(tmp_path, device="cpu") as engine:
        assert engine.scheduler.eos_token_ids == {200, stop_at, 1}
        out = engine.generate(prompt, params, use_tqdm=False)[0]
        assert out["token_ids"] == greedy[:5]
        assert out["finish_reason"] == "stop"
        assert engine.generate(prompt, GREEDY, use_tqdm=False)[0]["token_ids"] == greedy


def test_special_tokens_are_left_out_of_the_text(llm):
    assert llm.tokenizer.decode([1, *llm.tokenizer.encode("hi")], skip_special_tokens=True) == "hi"
    out = llm.generate([0, 50], GREEDY, use_tqdm=False)[0]
    assert "<s>" not in out["text"]


def test_chat_goes_through_the_template_without_a_second_bos(llm):
    talk = [{"role": "user", "content": "hi"}]
    out = llm.chat(talk, GREEDY, use_tqdm=False)[0]
    plain = llm.tokenizer.encode("<user>hi", add_special_tokens=False)
    answer = llm.tokenizer.encode("<assistant>", add_special_tokens=False)
    assert out["prompt_token_ids"] == [0, *plain, 1, *answer]
    two = llm.chat([talk, talk], GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
    assert [o["prompt_token_ids"] for o in two] == [
        [0, *plain, 1, *answer, llm.tokenizer.convert_tokens_to_ids("!")]
    ] * 2


def test_chat_reports_what_the_template_raises(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="conversation 0: the chat template refused it: roles must alternate"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)


@pytest.mark.parametrize(
    ("messages", "kwargs", "error", "message"),
    [
        ({"role": "user", "content": "hi"}, None, TypeError, "messages must be a list of messages or of conversations"),
        (5, None, TypeError, "messages must be a list"),
        ([], None, ValueError, "messages is empty"),
        ([[5]], None, TypeError, r"conversation 0: a conversation is a list of \{'role', 'content'\} dicts"),
        ([{"role": "user", "content": "hi"}], 5, TypeError, "chat_template_kwargs must be a dict, got 5"),
        ([{"role": "user", "content": "hi"}], {"tokenize": True}, ValueError, "may not set tokenize"),
    ],
)
def test_bad_conversations_are_refused(llm, messages, kwargs, error, message):
    with pytest.raises(error, match=message):
        llm.chat(messages, GREEDY, chat_template_kwargs=kwargs)


def test_requests_one_by_one(llm, reference):
    ids = {llm.add_request([4, 5, n], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)): n for n in (2, 4)}
    finished, processed = {}, []
    while not llm.is_finished():
        outs, num_tokens = llm.step()
        finished.update(outs)
        processed.append(num_tokens)
    assert finished == {seq_id: reference_greedy(reference, [4, 5, n], n) for seq_id, n in ids.items()}
    assert processed == [6, 2, 1, 1]
    assert llm.step() == ([], 0)


def test_outputs_are_made_while_others_run(llm, monkeypatch):
    left, make = [], Request.output
    monkeypatch.setattr(Request, "output", lambda request: (left.append(len(llm.scheduler.running)), make(request))[1])
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outs = llm.generate([[7, 8], [9], [7, 9]], params, use_tqdm=False)
    assert left == [2, 1, 0]
    assert [len(out["token_ids"]) for out in outs] == [9, 1, 5]


def test_ids_of_other_integer_types_become_plain_ones(llm):
    out = llm.generate([[np.int64(7), 8, np.uint8(1)]], GREEDY, use_tqdm=False)[0]
    assert out["prompt_token_ids"] == [7, 8, 1]
    assert {type(token_id) for token_id in out["prompt_token_ids"]} == {int}


def test_generate_leaves_requests_of_others_to_step(llm, reference):
    mine = llm.add_request([7, 8], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    llm.generate([[9, 9, 9]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert not llm.is_finished()
    assert llm.step()[0] == [(mine, reference_greedy(reference, [7, 8], 2))]
    assert idle(llm)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        ([[1, 2], []], None, ValueError, "prompt 1: the prompt is empty"),
        ([[1, 2], [258]], None, ValueError, "prompt 1: token id 258 is outside the vocabulary of 258"),
        ([[3, -1]], None, ValueError, "prompt 0: token id -1 is outside the vocabulary of 258"),
        ([[3, 2**70]], None, ValueError, f"prompt 0: token id {2**70} is outside the vocabulary of 258"),
        ([[-1]], None, ValueError, "prompt 0: token id -1 is outside"),
        ([[1, 2.5]], None, TypeError, r"prompt 0: token ids must be integers, got 2\.5"),
        ([[True]], None, TypeError, "prompt 0: token ids must be integers, got True"),
        (["a", 3], None, TypeError, "prompt 1: a prompt is a str or a list of token ids, got 3"),
        (["a", {"prompt": "b"}], None, TypeError, "prompt 1: a prompt is a str"),
        (7, None, TypeError, "prompts must be a str, token ids or a list of them, got 7"),
        ([[1] * 256], None, ValueError, "prompt 0: 256 prompt tokens and one to generate exceed max_model_len 256"),
        (["a", "b"], [SamplingParams()], ValueError, "1 sampling_params were given for 2 prompts"),
        ([""], None, ValueError, "prompt 0: the prompt is empty"),
        (["a", "b\ud800c"], None, ValueError, "prompt 1: the tokenizer refused the text"),
        ([[5, np.array([1, 2])]], None, TypeError, r"prompt 0: token ids must be integers, got array\(\[1, 2\]\)"),
        ([{1, 2}], None, TypeError, "prompt 0: a prompt is a str or a list of token ids"),
        (["a"], {}, TypeError, r"sampling_params must be SamplingParams or a list of them, got \{\}"),
        (["a"], [0.7], TypeError, r"prompt 0: sampling_params must be SamplingParams, got 0\.7"),
        (["a"], 0.7, TypeError, r"sampling_params must be SamplingParams or a list of them, got 0\.7"),
    ],
)
def test_bad_requests_are_refused_by_name_before_anything_runs(llm, prompts, params, error, message):
    before = llm._next_seq_id
    with pytest.raises(error, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm._next_seq_id == before
    assert idle(llm)


def test_request_that_can_never_fit_the_pool_is_refused(folder):
    with LLM(folder, device="cpu", num_kvcache_blocks=2) as engine:
        with pytest.raises(
            ValueError, match="prompt 1: 33 prompt tokens need 3 KV blocks, the pool has 2 of 16 tokens"
        ):
            engine.generate([[5], [5] * 33], GREEDY, use_tqdm=False)
        assert idle(engine)
        out = engine.generate([[5] * 30], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)[0]
        assert len(out["token_ids"]) == 3  # 32 slots hold the KV of 32 tokens; the 33rd needs none
        assert out["finish_reason"] == "length"


def test_max_model_len_bounds_the_completion(folder):
    with LLM(folder, device="cpu", max_model_len=20) as engine:
        out = engine.generate([[5] * 15], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)[0]
        assert len(out["token_ids"]) == 5
        assert out["finish_reason"] == "length"


def test_sampled_tokens_depend_on_seed_and_request_alone(folder):
    params = SamplingParams(temperature=1.3, max_tokens=20, ignore_eos=True)
    prompts = [[5, 6], [7], [8, 9, 10]]
    runs = []
    for options in (
        {"seed": 1},
        {"seed": 1, "max_num_seqs": 1},
        {"seed": 1, "num_kvcache_blocks": 3, "overlap": True},
        {"seed": 2},
    ):
        with LLM(folder, device="cpu", **options) as engine:
            runs.append([out["token_ids"] for out in engine.generate(prompts, params, use_tqdm=False)])
    assert runs[0] == runs[1] == runs[2]
    assert runs[0] != runs[3]


def test_tiny_top_p_equals_greedy_and_top_p_limits_the_choice(llm, reference):
    greedy = llm.generate([5, 6], GREEDY, use_tqdm=False)[0]["token_ids"]
    narrow = SamplingParams(temperature=1.0, top_p=1e-9, max_tokens=12, ignore_eos=True)
    mixed = llm.generate([[5, 6]] * 3, [narrow, SamplingParams(temperature=2.0), narrow], use_tqdm=False)
    assert mixed[0]["token_ids"] == mixed[2]["token_ids"] == greedy


def test_equal_prompts_in_one_batch_draw_differently_and_temperatures_stay_with_their_rows(llm):
    hot, cold = (SamplingParams(temperature=t, max_tokens=16, ignore_eos=True) for t in (1.5, 0))
    outs = [out["token_ids"] for out in llm.generate([[5, 6]] * 6, [hot, cold] * 3, use_tqdm=False)]
    assert len({tuple(out) for out in outs[::2]}) == 3
    assert outs[1] == outs[3] == outs[5]


def test_draws_are_the_argmax_of_scaled_logits_and_documented_noise(llm, reference):
    """Step by step with transformers' logits and noise of (seed, position of the drawn token, id)."""
    text, seed = [5, 6, 7], -(2**40) - 3
    sampled = SamplingParams(temperature=1.3, seed=seed, max_tokens=15, ignore_eos=True)
    out = llm.generate(text, sampled, use_tqdm=False)[0]["token_ids"]
    for token in out:
        with torch.inference_mode():
            logits = reference(torch.tensor([text])).logits[0, -1]
        noise = gumbel_noise(torch.tensor([seed]), torch.tensor([len(text)]), 258)[0]
        assert int((logits / 1.3 + noise).argmax()) == token
        text.append(token)


def test_dummy_weights_need_no_files_and_no_tokenizer(tmp_path):
    small_config("llama").save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", load_format="dummy") as engine:
        out = engine.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
        assert len(out["token_ids"]) == 4
        assert out["text"] is None
        with pytest.raises(ValueError, match="prompt 0: the model came without a tokenizer"):
            engine.generate("a")


def test_extreme_temperatures_give_valid_tokens_and_the_lowest_are_greedy(llm):
    params = [SamplingParams(temperature=t, max_tokens=6, ignore_eos=True) for t in (0, 1e-6, 1e-4, 1e6)]
    outs = [out["token_ids"] for out in llm.generate([[5]] * 4, params, use_tqdm=False)]
    assert outs[0] == outs[1] == outs[2]
    assert all(0 <= token < 258 for token in outs[3])


def test_stats_count_what_happened(folder):
    prompt = list(range(2, 42))
    with LLM(folder, device="cpu", num_kvcache_blocks=20) as engine:
        engine.generate(prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
        engine.generate(prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
        stats = engine.stats()
        assert stats["steps"] == 6
        assert stats["generated_tokens"] == 6
        assert stats["computed_tokens"] == 40 + 2 + 8 + 2
        assert (stats["prefix_queried_tokens"], stats["prefix_hit_tokens"]) == (80, 32)
        assert (stats["kv_blocks"], stats["kv_blocks_used"], stats["running"], stats["waiting"]) == (20, 0, 0, 0)
        assert stats["generated_tok_s"] == pytest.approx(6 / stats["seconds"])
        engine.add_request(prompt, GREEDY)
        engine.add_request([5], GREEDY)
        assert engine.stats()["waiting"] == 2
        engine.step()
        assert (engine.stats()["running"], engine.stats()["kv_blocks_used"]) == (2, 4)


def test_prefix_cache_can_be_reset_while_running(folder, reference):
    prompt = list(range(2, 42))
    with LLM(folder, device="cpu") as engine:
        running = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        for _ in range(5):
            engine.step()
        engine.reset_prefix_cache()
        out = engine.generate(prompt, GREEDY, use_tqdm=False)[0]
        assert out["num_cached_tokens"] == 0
        assert out["token_ids"] == reference_greedy(reference, prompt, 12)
        done = []
        while not engine.is_finished():
            done += engine.step()[0]
        assert done == [(running, reference_greedy(reference, prompt, 30))]
        assert engine.generate(prompt, GREEDY, use_tqdm=False)[0]["num_cached_tokens"] == 32
        assert idle(engine)
