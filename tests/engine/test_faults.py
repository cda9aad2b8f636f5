"""Exceptions raised in the middle of a step, at every stage: the engine goes on, and nobody else loses anything."""

from contextlib import contextmanager

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import scheduler
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import StopChecker
from nanovllm.engine.draw import Drawer
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner, StepResult
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import StepBuilder
from nanovllm.models.decoder import DecoderForCausalLM
from tests.helpers import reference_greedy, save_random_model, save_tokenizer, small_config

STAGES = {  # what raises, and at which of its calls
    "scheduling": (Scheduler, "schedule", 4),
    "making room": (BlockManager, "extend", 2),
    "input preparation": (StepBuilder, "build", 4),
    "device inputs": (ModelRunner, "_prepare", 4),
    "forward": (DecoderForCausalLM, "forward", 4),
    "sampling": (Drawer, "draw", 4),
    "waiting for tokens": (StepResult, "token_ids", 4),
    "taking tokens in": (Scheduler, "postprocess", 4),
    "publishing": (BlockManager, "publish", 2),
    "ending": (Scheduler, "finish", 2),
}
PROMPTS = [[9, 8, 7] * 6, [6, 5] * 10]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


class Fault(Exception):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    save_random_model(path, small_config("qwen3", vocab_size=258, num_hidden_layers=1), seed=3)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    """(prompt, number of tokens) to transformers' greedy completion; each is computed once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    longest: dict[tuple, list[int]] = {}

    def completion(prompt, num_tokens):
        key = tuple(prompt)
        if key not in longest:
            longest[key] = reference_greedy(model, prompt, 30)
        return longest[key][:num_tokens]

    return completion


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def llm(request, folder):
    with LLM(folder, device="cpu", overlap=request.param, num_kvcache_blocks=12, max_num_seqs=4) as engine:
        yield engine


@contextmanager
def raising(monkeypatch, owner, name, at, error, after=False):
    """The `at`-th call of `owner.name` raises, before or after it has done its work."""
    original, calls = getattr(owner, name), []

    def wrapper(*args, **kwargs):
        calls.append(args)
        if len(calls) == at and not after:
            raise error
        result = original(*args, **kwargs)
        if len(calls) == at:
            raise error
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrapper)
        yield


def check_idle(llm):
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)
    assert sorted(llm.scheduler._free_rows) == [0, 1, 2, 3]
    assert not llm._requests
    assert llm.is_finished()
    llm.scheduler.block_manager.check_integrity([])


def check_usable(llm, reference, others):
    """The next call answers its own prompts only, then `others` {request id: (prompt, tokens)} come out whole."""
    llm.stats()  # any use mends what broke off
    requests = set(llm._requests.values())
    assert {request.request_id for request in requests} <= set(others)
    llm.scheduler.block_manager.check_integrity(seq for request in requests for seq in request.sequences)
    out = llm.generate([[3, 3]], GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in out] == [reference([3, 3], 12)]
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    expected = [(key, reference(prompt, n)) for key, (prompt, n) in others.items()]
    assert sorted(finished) == expected
    check_idle(llm)


def drive(llm, outs):
    """Step until nothing is left; `outs` keeps what came before an exception."""
    while not llm.is_finished():
        outs += llm.step_outputs()


def run_generate(llm):
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def run_stream(llm):
    for _ in llm.stream(PROMPTS, GREEDY):
        pass


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("call", "after", "error"), [(run_generate, False, Fault), (run_stream, True, KeyboardInterrupt)]
)
def test_fault_in_a_call_takes_that_call_only(llm, reference, monkeypatch, stage, call, after, error):
    llm.reset_prefix_cache()
    other = llm.add_request([7, 8], LONG)
    with raising(monkeypatch, *STAGES[stage], error, after), pytest.raises(error):
        call(llm)
    check_usable(llm, reference, {other: ([7, 8], 30)})


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_fault_in_step_loses_the_step_but_no_request(llm, reference, monkeypatch, stage, after):
    llm.reset_prefix_cache()
    others = {llm.add_request(prompt, params): (prompt, params.max_tokens)
              for prompt, params in [(PROMPTS[0], GREEDY), (PROMPTS[1], GREEDY), ([7, 8], LONG)]}  # fmt: skip
    reported = []
    with raising(monkeypatch, *STAGES[stage], Fault, after), pytest.raises(Fault):
        drive(llm, reported)
    for key, out in reported:
        prompt, n = others.pop(key)
        assert out["token_ids"] == reference(prompt, n)
    check_usable(llm, reference, others)


def test_fault_between_the_last_token_and_the_end_adds_no_token(llm, reference, monkeypatch):
    """The token is in, but its sequence was not ended: by length, by a stop token, by a stop string."""
    expected = reference([7, 8], 12)
    assert expected[5] not in expected[:5]
    text = llm.tokenizer.decode(expected[:6])
    stops = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[expected[5]]),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[text[-1]], logprobs=1),
    ]
    for params in stops:
        alone = llm.generate([7, 8], params, use_tqdm=False)[0]
        assert alone["token_ids"] == expected[: len(alone["token_ids"])]
        for after in (False, True):
            key = llm.add_request([7, 8], params)
            with raising(monkeypatch, scheduler, "finish_reason", len(alone["token_ids"]), Fault, after):
                outs = []
                with pytest.raises(Fault):
                    drive(llm, outs)
            drive(llm, outs)
            assert [seq_id for seq_id, _ in outs] == [key]
            for field in ("token_ids", "text", "finish_reason", "stop_reason"):
                assert outs[0][1][field] == alone[field]
            assert len(outs[0][1].get("logprobs", expected)) == len(alone.get("logprobs", expected))
    check_idle(llm)


def test_fault_while_stop_strings_are_looked_for_leaves_the_text_whole(llm, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop="no such text")
    alone = llm.generate([7, 8], params, use_tqdm=False)[0]["text"]
    for name, at in [*(("push", at) for at in range(1, 13)), ("_search", 1)]:
        key = llm.add_request([7, 8], params)
        outs = []
        # KeyboardInterrupt, since an Exception there is taken for the tokenizer's and ends the request.
        with raising(monkeypatch, StopChecker, name, at, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            drive(llm, outs)
        drive(llm, outs)
        assert [(seq_id, out["text"]) for seq_id, out in outs] == [(key, alone)]
    check_idle(llm)


def failing_decode(llm, bad_id):
    original = llm.tokenizer.decode

    def decode(ids, **options):
        if bad_id in ids:
            raise IndexError(f"piece {bad_id} is out of range")
        return original(ids, **options)

    return decode


@pytest.mark.parametrize("options", [{}, {"stop": "no such text"}, {"logprobs": 1}])
def test_fault_of_one_request_ends_it_with_an_error_and_leaves_its_mates_alone(llm, reference, monkeypatch, options):
    """A tokenizer that cannot decode what one of them draws."""
    expected = [reference(prompt, 12) for prompt in ([7, 8], [40, 41])]
    bad_id = next(token for token in expected[0] if token not in expected[1])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **options)
    texts = [llm.tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    monkeypatch.setattr(llm.tokenizer, "decode", failing_decode(llm, bad_id))
    if "logprobs" in options:  # the second one's alternatives may hold the bad id
        expected[1] = llm.generate([40, 41], params, use_tqdm=False)[0]["token_ids"]
    bad, good = llm.generate([[7, 8], [40, 41]], params, use_tqdm=False)
    assert (bad["finish_reason"], bad["text"]) == ("error", None)
    assert bad["stop_reason"] == f"IndexError: piece {bad_id} is out of range"
    assert bad["token_ids"] == expected[0][: len(bad["token_ids"])]
    if "logprobs" not in options:
        assert (good["finish_reason"], good["text"]) == ("length", texts[1])
    got = {0: "", 1: ""}
    ends = {}
    for new in llm.stream([[7, 8], [40, 41]], params):
        got[new.index] += new.text
        if new.finished:
            ends[new.index] = (new.finish_reason, new.stop_reason)
    assert ends == {0: ("error", f"IndexError: piece {bad_id} is out of range"), 1: ("length", None)}
    assert texts[0].startswith(got[0])
    assert got[1] == texts[1]
    keys = [llm.add_request(prompt, params) for prompt in ([7, 8], [40, 41])]
    outs = {}
    while not llm.is_finished():
        outs.update(llm.step_outputs())
    assert outs[keys[0]]["finish_reason"] == "error"
    assert outs[keys[1]]["token_ids"] == expected[1]
    check_idle(llm)


def test_request_that_finished_in_a_step_that_broke_off_is_still_reported(folder, reference, monkeypatch):
    with LLM(folder, device="cpu") as engine:
        short = engine.add_request([7, 8], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        engine.add_request([7, 9], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        finish = Scheduler.finish

        def interrupted(self, seq, reason):
            if seq.seq_id != short:
                raise KeyboardInterrupt
            finish(self, seq, reason)

        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "finish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert engine.step()[0][0] == (short, reference([7, 8], 1))


@pytest.mark.parametrize("where", ["add", "after finish", "output"])
def test_interrupt_between_steps_leaves_nothing_behind_and_keeps_what_is_not_its_own(folder, monkeypatch, where):
    with LLM(folder, device="cpu") as engine:
        other = engine.add_request([7, 8], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        owner, name = {
            "add": (Scheduler, "add"),
            "after finish": (LLMEngine, "_step_for"),
            "output": (Request, "output"),
        }[where]
        original, calls = getattr(owner, name), []

        def interrupted(*args):
            result = original(*args)
            calls.append(args)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([[1, 2], [3, 4], [5, 6]], GREEDY, use_tqdm=False)
        assert not engine.is_finished()
        assert set(engine._requests) <= {other}
        done = []
        while not engine.is_finished():
            done += engine.step()[0]
        assert [seq_id for seq_id, _ in done] == [other]
        engine.scheduler.block_manager.check_integrity([])


def test_prompt_that_the_tokenizer_cannot_decode_ends_its_request_alone(llm, reference, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "decode", failing_decode(llm, 200))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    bad, good = llm.generate([[7, 200], [40, 41]], params, use_tqdm=False)
    assert (bad["finish_reason"], bad["prompt_logprobs"]) == ("error", None)
    assert good["finish_reason"] == "length"
    assert list(good["prompt_logprobs"][1]) == [41]
    check_idle(llm)
