"""Sampling parameters, outputs and streams through the whole engine, on a small random model."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.helpers import DEVICE, reference_greedy, save_random_model, save_tokenizer, small_config

# On a machine with a GPU the same tests cover the kernels, the graphs and the redraw from their logits.
# Several engines live at once, so each has a small pool.
ON = {"device": DEVICE, "dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 100}
PROMPTS = [[5, 6, 7], list(range(40, 75)), [9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    save_random_model(path, small_config("llama", vocab_size=258, max_position_embeddings=256), seed=5)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def llm(request, folder):
    with LLM(folder, **ON, overlap=request.param, max_num_seqs=4) as engine:
        yield engine
        engine.scheduler.block_manager.check_integrity([])


def params(**options):
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **options})


def tokens(llm, prompts, sampling):
    return [out["token_ids"] for out in llm.generate(prompts, sampling, use_tqdm=False)]


@torch.inference_mode()
def reference_edited(model, prompt, num_tokens, edit):
    """Greedy completion with `edit(logits, completion)` applied to the last position's logits."""
    text = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([text])).logits[0, -1].double()
        text.append(int(edit(logits, text[len(prompt) :]).argmax()))
    return text[len(prompt) :]


def test_filters_that_leave_one_token_are_greedy(llm, reference):
    expected = [reference_greedy(reference, prompt, 12) for prompt in PROMPTS]
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-6}, {"temperature": 0}):
        assert tokens(llm, PROMPTS, params(**{"temperature": 1.5, **narrow})) == expected
    mixed = [params(temperature=2.0, top_k=1), params(temperature=1.0), params()]
    outs = tokens(llm, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], mixed)
    assert outs[0] == outs[2] == expected[0]


def test_penalties_count_as_a_plain_loop_does(llm, reference):
    repetition, presence, frequency = 1.4, 0.6, 0.3

    def edit_for(prompt):
        def edit(logits, completion):
            for token in set(prompt) | set(completion):
                logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
            for token in set(completion):
                logits[token] -= presence + frequency * completion.count(token)
            return logits

        return edit

    penalised = params(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, max_tokens=30
    )
    expected = [reference_edited(reference, prompt, 30, edit_for(prompt)) for prompt in PROMPTS]
    assert expected[0] != reference_greedy(reference, PROMPTS[0], 30)
    assert tokens(llm, PROMPTS, penalised) == expected
    plain = reference_greedy(reference, PROMPTS[1], 12)
    assert tokens(llm, PROMPTS[:2], [penalised, params()]) == [expected[0], plain]


def test_penalties_survive_preemption(folder, reference):
    penalised = params(repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=40)
    prompts = [[n, n + 1] for n in range(6)]
    with LLM(folder, **ON) as roomy:
        expected = tokens(roomy, prompts, penalised)
    for overlap in (False, True):
        with LLM(folder, **{**ON, "num_kvcache_blocks": 6}, overlap=overlap) as tight:
            assert tokens(tight, prompts, penalised) == expected


def test_penalties_of_a_prompt_that_comes_in_chunks(folder):
    """The first chunk does not sample, but the sequence gets its row with it."""
    penalised = params(repetition_penalty=1.4, frequency_penalty=0.3)
    with LLM(folder, **ON) as whole, LLM(folder, **ON, max_num_batched_tokens=9, max_num_seqs=4) as chunked:
        assert tokens(chunked, PROMPTS, penalised) == tokens(whole, PROMPTS, penalised)


def test_bias_bans_and_allowed_ids(llm, reference):
    greedy = reference_greedy(reference, PROMPTS[0], 12)

    def banning(logits, _):
        logits[greedy[0]] -= 100
        logits[17] += 3
        return logits

    expected = reference_edited(reference, PROMPTS[0], 12, banning)
    assert tokens(llm, PROMPTS[0], params(logit_bias={greedy[0]: -100, 17: 3}))[0] == expected
    assert tokens(llm, PROMPTS[0], params(logit_bias={33: 100}))[0] == [33] * 12

    def only(logits, _):
        kept = torch.full_like(logits, float("-inf"))
        kept[[3, 50, 99]] = logits[[3, 50, 99]]
        return kept

    allowed = params(allowed_token_ids=[3, 50, 99])
    assert tokens(llm, [PROMPTS[0], PROMPTS[0]], [allowed, params()]) == [
        reference_edited(reference, PROMPTS[0], 12, only),
        greedy,
    ]


def test_min_tokens_bans_every_end_until_then(folder, reference, tmp_path):
    prompt = [5, 6, 7]
    greedy = reference_greedy(reference, prompt, 12)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": greedy[0]}))
    ends = [greedy[0], greedy[1], 1]

    def banning(logits, completion):
        if len(completion) < 6:
            logits[ends] = float("-inf")
        return logits

    with LLM(tmp_path, **ON) as llm:
        assert llm.generate(prompt, params(ignore_eos=False), use_tqdm=False)[0]["token_ids"] == greedy[:1]
        options = {"ignore_eos": False, "min_tokens": 6, "stop_token_ids": [greedy[1]], "max_tokens": 30}
        out = llm.generate(prompt, params(**options), use_tqdm=False)[0]
        expected = reference_edited(reference, prompt, 30, banning)
        stop = next((i for i, token in enumerate(expected) if token in ends), 29)
        assert out["token_ids"] == expected[: stop + 1]
        assert len(out["token_ids"]) > 6


def test_stop_token_ids_end_with_their_reason(llm, reference):
    greedy = reference_greedy(reference, PROMPTS[0], 12)
    stop = greedy[4]
    out = llm.generate(PROMPTS[0], params(stop_token_ids=[stop]), use_tqdm=False)[0]
    first = greedy.index(stop)
    assert out["token_ids"] == greedy[: first + 1]
    assert (out["finish_reason"], out["stop_reason"]) == ("stop", stop)
    assert out["text"] == llm.tokenizer.decode(greedy[:first])
    kept = llm.generate(PROMPTS[0], params(stop_token_ids=[stop], include_stop_str_in_output=True), use_tqdm=False)[0]
    assert kept["text"] == llm.tokenizer.decode(greedy[: first + 1])


@pytest.mark.parametrize("options", [{"skip_special_tokens": False}, {"stop_token_ids": [70]}], ids=["eos", "stop id"])
def test_the_token_that_ends_shows_in_no_text_with_stop_strings_either(llm, options):
    end = options.get("stop_token_ids", [llm.tokenizer.eos_token_id])[0]
    options = params(logit_bias={end: 100}, min_tokens=3, ignore_eos=False, **options)
    for more in ({}, {"include_stop_str_in_output": True}):
        plain = replace(options, **more)
        looking = replace(plain, stop=["never this one"])
        expected, out = (llm.generate([5], some, use_tqdm=False)[0] for some in (plain, looking))
        assert expected["finish_reason"] == "stop"
        assert expected["token_ids"][-1] == end
        assert (out["token_ids"], out["text"], out["stop_reason"]) == (
            expected["token_ids"],
            expected["text"],
            expected["stop_reason"],
        )
        assert "".join(new.text for new in llm.stream([5], looking)) == expected["text"]


def test_stop_strings_end_and_cut(llm):
    forced = dict.fromkeys(llm.tokenizer.encode("q", add_special_tokens=False), 100)
    out = llm.generate([5], params(logit_bias=forced, stop=["zz", "qqq"]), use_tqdm=False)[0]
    assert out["text"] == ""
    assert (out["finish_reason"], out["stop_reason"]) == ("stop", "qqq")
    assert len(out["token_ids"]) == 3
    out = llm.generate([5], params(logit_bias=forced, stop="qqq", include_stop_str_in_output=True), use_tqdm=False)[0]
    assert out["text"] == "qqq"
    out = llm.generate([5], params(logit_bias=forced, stop="qqq", min_tokens=5), use_tqdm=False)[0]
    assert out["text"] == "qqq"  # the sixth token completes a match that begins within the first five
    assert len(out["token_ids"]) == 6
    out = llm.generate([5], params(logit_bias=forced, stop="never"), use_tqdm=False)[0]
    assert (out["text"], out["finish_reason"], out["stop_reason"]) == ("q" * 12, "length", None)


def test_seeded_requests_draw_the_same_whatever_surrounds_them(folder):
    mine = params(temperature=1.2, seed=77, max_tokens=25)
    runs = []
    for options in (
        {},
        {"max_num_seqs": 1},
        {"num_kvcache_blocks": 4},
        {"overlap": True},
        {"max_num_batched_tokens": 8},
    ):
        with LLM(folder, **{**ON, "max_num_seqs": 8, **options}) as engine:
            tokens(engine, [3], params())  # moves the request numbers
            others = [params(temperature=0.7)] * 3
            runs.append(tokens(engine, [[1, 2], PROMPTS[1], [8], [4]], [others[0], mine, *others[1:]])[1])
    assert all(run == runs[0] for run in runs)
    assert len(set(runs[0])) > 5


def test_unseeded_requests_leave_torchs_generator_alone(llm):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    tokens(llm, PROMPTS, params(temperature=1.0))
    assert torch.equal(torch.rand(3), expected)


def test_n_completions_share_the_prompt_and_differ(llm):
    prompt = [77, *range(100, 170)]  # 71 tokens: four full blocks of 16
    before = llm._next_seq_id
    out = llm.generate(prompt, params(temperature=1.5, seed=5, n=7), use_tqdm=False)[0]
    assert llm._next_seq_id == before + 7  # seven sequences, on four rows
    completions = [tuple(c["token_ids"]) for c in out["completions"]]
    assert len(completions) == len(set(completions)) == 7
    assert out["token_ids"] == list(completions[0])
    assert tokens(llm, prompt, params(temperature=1.5, seed=5))[0] == list(completions[0])
    again = llm.generate(prompt, params(temperature=1.5, seed=5, n=7), use_tqdm=False)[0]
    assert [tuple(c["token_ids"]) for c in again["completions"]] == completions
    assert again["num_cached_tokens"] == 64


def test_logprobs_equal_transformers(llm, reference):
    outs = llm.generate(PROMPTS, [params(logprobs=3), params(temperature=1.3, logprobs=0), params()], use_tqdm=False)
    assert "logprobs" not in outs[2]
    for out, count in ((outs[0], 3), (outs[1], 0)):
        text = out["prompt_token_ids"] + out["token_ids"]
        with torch.inference_mode():
            expected = reference(torch.tensor([text])).logits[0].double().log_softmax(-1)
        assert len(out["logprobs"]) == len(out["token_ids"])
        for i, entry in enumerate(out["logprobs"]):
            row = expected[len(out["prompt_token_ids"]) + i - 1]
            assert next(iter(entry)) == out["token_ids"][i]
            assert set(entry) == {out["token_ids"][i], *row.argsort(descending=True)[:count].tolist()}
            for token_id, value in entry.items():
                assert value["logprob"] == pytest.approx(float(row[token_id]), abs=1e-4)
                assert value["token"] == llm.tokenizer.decode([token_id])


def test_stream_adds_up_to_generate_and_shows_no_half_characters(llm):
    sampling = [params(temperature=1.0, seed=i, max_tokens=40) for i in range(3)]
    outs = llm.generate(PROMPTS, sampling, use_tqdm=False)
    text, ids, ended = [""] * 3, [[], [], []], {}
    for new in llm.stream(PROMPTS, sampling):
        assert new.index not in ended
        text[new.index] += new.text
        ids[new.index] += new.token_ids
        if new.finished:
            ended[new.index] = new.finish_reason
    assert text == [out["text"] for out in outs]
    assert ids == [out["token_ids"] for out in outs]
    assert ended == {0: "length", 1: "length", 2: "length"}


def test_stream_never_shows_what_a_stop_string_takes_back(llm):
    forced = dict.fromkeys(llm.tokenizer.encode("q", add_special_tokens=False), 100)
    pieces = [new.text for new in llm.stream([5], params(logit_bias=forced, stop="qqqq", max_tokens=30))]
    assert "".join(pieces) == ""


def test_leaving_a_stream_early_or_before_it_began_leaves_nothing(llm, reference):
    for new in llm.stream(PROMPTS, params(max_tokens=100)):
        assert not new.finished
        break
    assert llm.is_finished()
    llm.stream(PROMPTS, params())
    assert llm.is_finished()
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        llm.stream([[1], []])
    assert tokens(llm, [[9]], params()) == [reference_greedy(reference, [9], 12)]


def test_abort_drops_one_request_and_leaves_the_others(llm, reference):
    first = llm.add_request([5, 6], params(max_tokens=30))
    second = llm.add_request([7, 8], params(max_tokens=8))
    llm.step()
    assert llm.abort(first)
    assert not llm.abort(first)
    assert not llm.abort(10**6)
    done = []
    while not llm.is_finished():
        done += llm.step_outputs()
    assert [seq_id for seq_id, _ in done] == [second]
    assert done[0][1]["token_ids"] == reference_greedy(reference, [7, 8], 8)
    assert not llm.abort(second)


def test_none_as_max_tokens_goes_as_far_as_the_window(llm):
    out = llm.generate([5] * 200, params(max_tokens=None), use_tqdm=False)[0]
    assert len(out["token_ids"]) == 56
    assert out["finish_reason"] == "length"


def test_detokenize_and_special_tokens(llm):
    out = llm.generate([5], params(detokenize=False), use_tqdm=False)[0]
    assert out["text"] is None
    forced = params(logit_bias={1: 100}, max_tokens=2)
    assert llm.generate([5], forced, use_tqdm=False)[0]["text"] == ""
    shown = params(logit_bias={1: 100}, max_tokens=2, skip_special_tokens=False)
    assert llm.generate([5], shown, use_tqdm=False)[0]["text"] == "</s></s>"


def test_metrics_are_times_in_order(llm):
    out = llm.generate([5], params(), use_tqdm=False)[0]["metrics"]
    assert 0 <= out["queue_time"] <= out["time_to_first_token"]
    assert out["time_per_output_token"] > 0
    one = llm.generate([5], params(max_tokens=1), use_tqdm=False)[0]["metrics"]
    assert one["time_per_output_token"] is None


def test_requests_that_leave_no_token_are_refused(llm):
    """What may come is known before anything runs: single-token bad words, and ends before `min_tokens`."""
    q, r = llm.tokenizer.encode("qr", add_special_tokens=False)
    space = llm.tokenizer.encode(" ", add_special_tokens=False)[0]
    cases = [
        (
            {"allowed_token_ids": [q, r], "bad_words": ["q", "r"]},
            rf"bad_words leave no .* allowed_token_ids \[{q}, {r}\]",
        ),
        ({"allowed_token_ids": [1, q], "min_tokens": 2, "stop_token_ids": [q]}, "min_tokens 2 leave no token"),
        ({"allowed_token_ids": [1, q], "min_tokens": 2, "bad_words": ["q"]}, "bad_words and min_tokens 2 leave no"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=f"prompt 0: {message}"):
            llm.generate([5], params(**options), use_tqdm=False)
    assert llm.is_finished()
    fine = params(allowed_token_ids=[q, r, space], bad_words=["q", "rr"], min_tokens=3, ignore_eos=False)
    (out,) = tokens(llm, [5], fine)
    assert set(out) <= {r, space}
    assert (r, r) not in set(itertools.pairwise(out))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": [258]}, "prompt 0: stop_token_ids 258 is outside the vocabulary of 258"),
        ({"logit_bias": {300: 1}}, "prompt 0: logit_bias token id 300 is outside the vocabulary"),
        ({"allowed_token_ids": [1, 999]}, "prompt 0: allowed_token_ids 999 is outside the vocabulary"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(llm, options, message):
    with pytest.raises(ValueError, match=message):
        llm.generate([5], params(**options), use_tqdm=False)
    assert llm.is_finished()
