"""Structured output: every output parses, whatever the scheduling; a random model would write no two right bytes."""

import json
import re
import sys

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers.sampler import apply_masks
from tests.helpers import DEVICE, reference_greedy, save_random_model, save_tokenizer, small_config

pytest.importorskip("llguidance")

ON = {"device": DEVICE, "dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 200, "max_num_seqs": 6}
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "tag": {"enum": ["red", "é🙂", 'q"']},
        "n": {"type": "integer", "maximum": 9},
    },
    "required": ["ok", "tag", "n"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "<" item ("," item)* ">"\nitem: /[a-c]{1,2}/'
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    config = small_config("llama", vocab_size=270, eos_token_id=1)  # beyond the tokenizer's 258
    return folder, save_random_model(folder, config, seed=5)


def sampling(**options):
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 200, "seed": 4, **options})


KINDS = [
    sampling(json_schema=SCHEMA, n=2),
    sampling(regex="[0-9]{3}-[a-f]+x", ignore_eos=True),
    sampling(choice=["yes", "no", "no way", 'mä"ybe\n'], n=3),
    sampling(grammar=GRAMMAR),
]


def check(out):
    schema, regex, choice, grammar = out
    for completion in schema["completions"]:
        value = json.loads(completion["text"])
        assert set(value) == {"ok", "tag", "n"}
        assert isinstance(value["ok"], bool)
        assert value["tag"] in SCHEMA["properties"]["tag"]["enum"]
        assert isinstance(value["n"], int)
        assert value["n"] <= 9
    assert re.fullmatch("[0-9]{3}-[a-f]+x", regex["text"])
    assert all(completion["text"] in KINDS[2].choice for completion in choice["completions"])
    assert re.fullmatch("<[a-c]{1,2}(,[a-c]{1,2})*>", grammar["text"])
    for request in out:
        for completion in request.get("completions", [request]):
            assert (completion["finish_reason"], completion["stop_reason"]) == ("stop", None)


@pytest.mark.parametrize(
    "options",
    [{"overlap": False}, {"overlap": True}, {"num_kvcache_blocks": 16, "overlap": True, "max_num_batched_tokens": 12}],
    ids=["plain", "overlap", "tight"],
)
def test_every_output_parses_and_none_depends_on_scheduling(model, options):
    """In the tight pool prompts come in chunks and rows are preempted. A batch-mate without a grammar goes on."""
    folder, reference = model
    prompts = [PROMPT, list(range(40, 75)), [9], PROMPT, [8, 9]]
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(folder, **{**ON, **options}) as llm:
        outs = llm.generate(prompts, [*KINDS, plain], use_tqdm=False)
        llm.scheduler.block_manager.check_integrity([])
    check(outs[:4])
    assert outs[4]["token_ids"] == reference_greedy(reference, [8, 9], 30)
    with LLM(folder, **ON) as alone:
        expected = [alone.generate(p, k, use_tqdm=False)[0] for p, k in zip(prompts, KINDS, strict=False)]
    for out, want in zip(outs, expected, strict=False):
        assert out.get("completions") == want.get("completions")
        assert out["token_ids"] == want["token_ids"]


def test_a_greedy_completion_takes_the_best_allowed_byte(model):
    folder, reference = model
    with LLM(folder, **ON) as llm:
        digits = llm.tokenizer.encode("0123456789", add_special_tokens=False)
        out = llm.generate(PROMPT, sampling(temperature=0, regex="[0-9]{12}", logprobs=0), use_tqdm=False)[0]
    text = list(PROMPT)
    with torch.inference_mode():
        for token, entry in zip(out["token_ids"], out["logprobs"], strict=True):
            logits = reference(torch.tensor([text])).logits[0, -1]
            assert token == digits[int(logits[digits].argmax())]
            # The model's own, before the mask.
            assert entry[token]["logprob"] == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)
            text.append(token)
    assert len(out["token_ids"]) == len(out["text"]) == 12


def test_a_stream_adds_up_and_cut_completions_say_so(model):
    folder, _ = model
    with LLM(folder, **ON) as llm:
        whole = llm.generate(PROMPT, KINDS[1], use_tqdm=False)[0]
        assert "".join(new.text for new in llm.stream(PROMPT, KINDS[1])) == whole["text"]
        cut = llm.generate(PROMPT, sampling(regex="[0-9]{12}", max_tokens=5), use_tqdm=False)[0]
        assert re.fullmatch("[0-9]{5}", cut["text"])
        assert cut["finish_reason"] == "length"
        banned = llm.generate(PROMPT, sampling(regex="ab*", max_tokens=40, logit_bias={1: 100}), use_tqdm=False)[0]
        assert (banned["text"], banned["token_ids"][-1]) == ("a", 1)  # an end as soon as one is allowed


def test_what_broke_off_goes_on_in_the_grammar(model, monkeypatch):
    folder, _ = model
    with LLM(folder, **ON, overlap=True) as llm:
        ids = [llm.add_request(PROMPT, kind) for kind in KINDS]
        done = {}
        for _ in range(5):
            done.update(llm.step_outputs())
        with monkeypatch.context() as patch:
            patch.setattr(llm.model_runner, "launch", lambda inputs: 1 / 0)
            if llm._in_flight:
                done.update(llm.step_outputs())  # launches nothing: all wait for their tokens
            with pytest.raises(ZeroDivisionError):
                llm.step_outputs()
        while not llm.is_finished():
            done.update(llm.step_outputs())
    check([done[i] for i in ids])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a(b"}, r"prompt 0: regex 'a\(b' is not accepted: (?s:.*)unclosed group"),
        ({"grammar": "nonsense"}, "prompt 0: grammar 'nonsense' is not accepted"),
        ({"json_schema": {"type": "no such type"}}, "prompt 0: json_schema .* is not accepted"),
        ({"json_schema": "{"}, "prompt 0: json_schema '{' is not accepted"),
    ],
)
def test_grammars_that_are_wrong_are_refused(model, options, message):
    with LLM(model[0], **ON) as llm:
        with pytest.raises(ValueError, match=message):
            llm.generate(PROMPT, sampling(**options), use_tqdm=False)
        assert llm.is_finished()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"regex": "a", "grammar": "b"}, ValueError, "only one of regex and grammar can be followed"),
        ({"regex": 5}, TypeError, "regex must be a string, got 5"),
        ({"grammar": " "}, ValueError, "grammar must not be empty"),
        ({"choice": "yes"}, TypeError, "choice must be a list of strings, got 'yes'"),
        ({"choice": []}, ValueError, "choice must hold at least one string, and no empty one"),
        ({"json_schema": 3}, TypeError, "json_schema must be a dict or a string, got 3"),
        ({"json_schema": {"a": object()}}, ValueError, "json_schema cannot be written as JSON"),
        ({"regex": "a", "min_tokens": 2}, ValueError, "regex and min_tokens cannot be combined"),
        ({"choice": ["a"], "bad_words": ["a"]}, ValueError, "choice and bad_words cannot be combined"),
        ({"regex": "a", "allowed_token_ids": [1]}, ValueError, "regex and allowed_token_ids cannot be combined"),
    ],
)
def test_wrong_parameters_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**options)


def test_without_the_package_the_extra_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LLM(model[0], **ON) as llm, pytest.raises(ValueError, match=r"prompt 0: .*pip install 'nano-vllm\[structured"):
        llm.generate(PROMPT, sampling(regex="a"), use_tqdm=False)


def test_masks_are_unpacked_bit_by_bit():
    torch.manual_seed(0)
    logits, allowed = torch.randn(3, 77), torch.rand(3, 77) < 0.5
    bits = torch.zeros(3, 96, dtype=torch.int64)
    bits[:, :77] = allowed
    masks = (bits.view(3, 3, 32) << torch.arange(32)).sum(-1).to(torch.int32)  # the top bit is the sign
    expected = torch.where(allowed, logits, float("-inf"))
    assert torch.equal(apply_masks(logits, masks), expected)
