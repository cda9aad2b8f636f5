"""Hostile and odd input in any order: a useful TypeError or ValueError, or a correct result, and never a trace left.

CI tries 500 cases of each kind together; NANOVLLM_FUZZ_EXAMPLES asks for more.
"""

import os
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nanovllm
from nanovllm import LLM, SamplingParams
from tests.helpers import DEVICE, save_random_model, save_tokenizer, small_config

LIBRARY = Path(nanovllm.__file__).parent
EXAMPLES = int(os.environ.get("NANOVLLM_FUZZ_EXAMPLES", "500"))
WINDOW = 48
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(-1, 300), max_size=3),
    st.dictionaries(st.integers(-1, 300), st.floats(-200, 200), max_size=2),
    st.sampled_from([np.int8(5), np.uint8(250), np.float32(0.5), np.array([1, 2]), np.array(3), object()]),
)
GOOD = {
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 400),
    "min_p": st.floats(0, 1),
    "seed": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    "n": st.integers(1, 4),
    "max_tokens": st.one_of(st.none(), st.integers(1, 60)),
    "min_tokens": st.integers(0, 10),
    "repetition_penalty": st.floats(0.5, 3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 260), st.floats(-100, 100), max_size=4),
    "allowed_token_ids": st.lists(st.integers(0, 257), min_size=1, max_size=4),
    "bad_words": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "regex": st.one_of(st.none(), st.sampled_from(["[a-f]{2,5}", "a(", ""]), st.text(max_size=3)),
    "choice": st.lists(st.text(max_size=3), max_size=3),
    "prompt_logprobs": st.one_of(st.none(), st.integers(0, 20)),
    "stop": st.one_of(st.text(min_size=1, max_size=2), st.lists(st.text(min_size=1, max_size=2), max_size=3)),
    "stop_token_ids": st.lists(st.integers(0, 258), max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "logprobs": st.one_of(st.none(), st.integers(0, 20)),
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
}
FIELDS = st.dictionaries(st.sampled_from([*GOOD, "no_such_field"]), st.booleans(), max_size=5)
PROMPT = st.one_of(
    st.text(max_size=60),
    st.lists(st.integers(0, 257), min_size=1, max_size=WINDOW),
    st.lists(st.integers(-1, 259), max_size=6),
    ODD,
)


@st.composite
def parameters(draw):
    """Mostly good values, now and then an odd one."""
    options = {}
    for name in draw(FIELDS):
        odd = name not in GOOD or draw(st.integers(0, 7)) == 0
        options[name] = draw(ODD if odd else GOOD[name])
    return options


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    config = small_config("llama", vocab_size=258, num_hidden_layers=1, hidden_size=32, max_position_embeddings=WINDOW)
    save_random_model(path, config)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def llm(request, folder):
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 7, "max_num_seqs": 3, "max_num_batched_tokens": 10}
    with LLM(folder, device=DEVICE, dtype="float32", overlap=request.param, **options) as engine:
        yield engine


def require_refusal(error):
    """The error was raised on purpose: by a `raise` in the library, or by Python for an unknown parameter name."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    on_purpose = frame.filename.startswith(str(LIBRARY)) and (frame.line or "").startswith("raise ")
    if not on_purpose and "unexpected keyword argument" not in str(error):
        raise AssertionError("an error that nobody meant to raise") from error


def check_output(llm, out, params):
    completions = out.get("completions", [out])
    assert len(completions) == params.n
    for completion in completions:
        ids = completion["token_ids"]
        assert 1 <= len(ids) <= WINDOW - len(out["prompt_token_ids"])
        assert params.max_tokens is None or len(ids) <= params.max_tokens
        assert all(0 <= i < 258 for i in ids)
        assert completion["finish_reason"] in ("stop", "length")
        if completion["finish_reason"] == "length":
            limits = [WINDOW - len(out["prompt_token_ids"]), params.max_tokens or WINDOW]
            assert len(ids) == min(limits)
        if params.allowed_token_ids:
            assert set(ids) <= set(params.allowed_token_ids)
        if isinstance(completion["stop_reason"], str):
            assert completion["text"].endswith(completion["stop_reason"]) == params.include_stop_str_in_output
        assert (completion["text"] is None) == (not params.detokenize)
        if params.logprobs is not None:
            assert [next(iter(entry)) for entry in completion["logprobs"]] == ids
    if params.prompt_logprobs is not None:
        assert out["prompt_logprobs"][0] is None
        assert [next(iter(entry)) for entry in out["prompt_logprobs"][1:]] == out["prompt_token_ids"][1:]


def cases(share):
    """This share of all cases."""
    slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=max(1, int(EXAMPLES * share)), deadline=None, suppress_health_check=slow)


def check_idle(llm):
    assert llm.is_finished()
    assert not llm._requests
    llm.scheduler.block_manager.check_integrity([])
    assert sorted(llm.scheduler._free_rows) == list(range(llm.scheduler.max_num_seqs))


@cases(0.25)  # for each of two engines
@given(st.data())
def test_any_call_gives_a_result_or_a_useful_error(llm, data):
    prompts = data.draw(st.one_of(st.lists(PROMPT, max_size=4), PROMPT))
    options = data.draw(parameters())
    try:
        params = SamplingParams(**options)
        if data.draw(st.booleans()):
            outs = llm.generate(prompts, params, use_tqdm=False)
        else:
            outs = []
            for i, _ in enumerate(llm.stream(prompts, params)):
                if i == 3:
                    break
    except (TypeError, ValueError) as error:
        require_refusal(error)
    else:
        for out in outs:
            check_output(llm, out, params)
    check_idle(llm)


class Client:
    """Calls an engine in whatever order; knows what it may expect of it."""

    def __init__(self, llm, data):
        self.llm, self.data = llm, data
        self.waiting = {}  # request id -> parameters
        self.streams = []

    def add(self):
        params = SamplingParams(**self.data.draw(parameters()))
        self.waiting[self.llm.add_request(self.data.draw(PROMPT), params)] = params

    def step(self):
        for request_id, out in self.llm.step_outputs():
            check_output(self.llm, out, self.waiting.pop(request_id))

    def plain_step(self):
        for request_id, token_ids in self.llm.step()[0]:
            assert token_ids
            del self.waiting[request_id]

    def abort(self):
        request_id = self.data.draw(st.one_of(st.sampled_from([*self.waiting, -1]), ODD))
        if self.llm.abort(request_id):
            del self.waiting[request_id]

    def generate(self):
        params = SamplingParams(**self.data.draw(parameters()))
        for out in self.llm.generate(self.data.draw(st.lists(PROMPT, max_size=3)), params, use_tqdm=False):
            check_output(self.llm, out, params)

    def start_stream(self):
        self.streams.append(self.llm.stream(self.data.draw(st.lists(PROMPT, max_size=3))))

    def read_stream(self):
        for stream in self.streams[-1:]:
            next(stream, None)

    def leave_stream(self):
        self.streams = self.streams[:-1]

    def chat(self):
        message = st.fixed_dictionaries({"role": st.text(max_size=3), "content": st.one_of(st.text(max_size=9), ODD)})
        messages = self.data.draw(st.one_of(st.lists(st.one_of(message, ODD), max_size=2), ODD))
        kwargs = self.data.draw(st.one_of(st.none(), ODD))
        params = SamplingParams(max_tokens=2)
        for out in self.llm.chat(messages, params, use_tqdm=False, chat_template_kwargs=kwargs):
            check_output(self.llm, out, params)

    def score(self):
        for out in self.llm.score(self.data.draw(st.lists(PROMPT, max_size=2)), use_tqdm=False):
            assert len(out["logprobs"]) == len(out["token_ids"])
            assert out["total"] <= 0

    def look(self):
        stats = self.llm.stats()
        assert 0 <= stats["kv_blocks_used"] <= stats["kv_blocks"]
        assert self.llm.is_finished() <= (not self.waiting)

    def reset(self):
        self.llm.reset_prefix_cache()


CALLS = [name for name in vars(Client) if not name.startswith("_")]


@cases(0.15)
@given(st.data())
def test_any_order_of_calls_loses_nothing(llm, data):
    while not llm.is_finished():
        llm.step()  # what a case left that hypothesis gave up in its middle
    client = Client(llm, data)
    for call in data.draw(st.lists(st.sampled_from(CALLS), max_size=12)):
        try:
            getattr(client, call)()
        except (TypeError, ValueError) as error:
            require_refusal(error)
    client.streams.clear()
    while not llm.is_finished():
        client.step()
    assert not client.waiting
    check_idle(llm)


OPTIONS = {
    "max_num_batched_tokens": st.integers(1, 64),
    "max_num_seqs": st.integers(1, 8),
    "max_model_len": st.integers(1, WINDOW + 1),
    "gpu_memory_utilization": st.floats(0, 1),
    "tensor_parallel_size": st.just(1),
    "enforce_eager": st.booleans(),
    "kvcache_block_size": st.sampled_from([16, 32, 48]),
    "num_kvcache_blocks": st.integers(1, 9),
    "enable_prefix_caching": st.booleans(),
    "dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    "kv_cache_dtype": st.sampled_from(["auto", "fp8"]),
    "quantization": st.sampled_from([None, "fp8"]),
    "attention_backend": st.sampled_from(["auto", "torch"]),
    "overlap": st.one_of(st.none(), st.booleans()),
    "seed": st.integers(-(2**63), 2**63 - 1),
}


@cases(0.2)
@given(st.data())
def test_any_options_give_an_engine_or_a_useful_error(folder, data):
    named = data.draw(st.dictionaries(st.sampled_from([*OPTIONS, "no_such_option"]), st.integers(0, 5), max_size=5))
    options = {name: data.draw(OPTIONS[name] if odd and name in OPTIONS else ODD) for name, odd in named.items()}
    try:
        llm = LLM(folder, load_format="dummy", **{"device": "cpu", "num_kvcache_blocks": 7, **options})
    except (TypeError, ValueError) as error:
        require_refusal(error)
        return
    with llm:
        params = SamplingParams(temperature=0, max_tokens=5)
        try:
            outs = llm.generate(["a", [5, 6, 7] * 9], params, use_tqdm=False)
        except ValueError as error:  # a window or a pool too small for them
            require_refusal(error)
        else:
            assert all(1 <= len(out["token_ids"]) <= 5 for out in outs)
        check_idle(llm)
