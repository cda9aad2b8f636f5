"""Hostile and odd input in any order: a useful TypeError or ValueError, or a correct result, and never a trace left.

CI runs 500 calls; NANOVLLM_FUZZ_EXAMPLES asks for more.
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


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def llm(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    config = small_config("llama", vocab_size=258, num_hidden_layers=1, hidden_size=32, max_position_embeddings=WINDOW)
    save_random_model(path, config)
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 7, "max_num_seqs": 3, "max_num_batched_tokens": 10}
    with LLM(path, device=DEVICE, dtype="float32", overlap=request.param, **options) as engine:
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
        if params.allowed_token_ids and not params.min_tokens:
            assert set(ids) <= set(params.allowed_token_ids)
        if isinstance(completion["stop_reason"], str):
            assert completion["text"].endswith(completion["stop_reason"]) == params.include_stop_str_in_output
        assert (completion["text"] is None) == (not params.detokenize)
        if params.logprobs is not None:
            assert [next(iter(entry)) for entry in completion["logprobs"]] == ids


@settings(
    max_examples=EXAMPLES // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
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
    assert llm.is_finished()
    llm.scheduler.block_manager.check_integrity([])
    assert sorted(llm.scheduler._free_rows) == [0, 1, 2]
