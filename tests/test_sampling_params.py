import dataclasses

import numpy as np
import pytest

from nanovllm import SamplingParams


def test_defaults_and_fields():
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=150)
    assert (params.temperature, params.top_p, params.max_tokens, params.ignore_eos) == (0.8, 0.95, 150, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0


def test_low_temperatures_are_greedy():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, "temperature must be between 0 and 1e\\+30, got -0.1"),
        ({"temperature": float("nan")}, ValueError, "temperature must be between 0 and 1e\\+30, got nan"),
        ({"temperature": float("inf")}, ValueError, "temperature must be between 0 and 1e\\+30, got inf"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, got 'hot'"),
        ({"temperature": 10**400}, ValueError, "temperature must be between 0 and 1e"),
        ({"temperature": True}, TypeError, "temperature must be a number, got True"),
        ({"top_p": 0}, ValueError, "top_p must be above 0, got 0"),
        ({"top_p": 1.01}, ValueError, "top_p must be between 0 and 1, got 1.01"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -3}, ValueError, "max_tokens must be at least 1, got -3"),
        ({"max_tokens": 2.5}, TypeError, "max_tokens must be an integer, got 2.5"),
        ({"max_tokens": "9"}, TypeError, "max_tokens must be an integer, got '9'"),
        ({"min_tokens": -1}, ValueError, "min_tokens must be at least 0, got -1"),
        ({"min_tokens": 9, "max_tokens": 8}, ValueError, r"min_tokens \(9\) must not exceed max_tokens \(8\)"),
        ({"top_k": -2}, ValueError, "top_k must be at least -1, got -2"),
        ({"top_k": 1.5}, TypeError, "top_k must be an integer, got 1.5"),
        ({"min_p": 1.1}, ValueError, "min_p must be between 0 and 1, got 1.1"),
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"n": 2**14 + 1}, ValueError, "n must be at most 16384, got 16385"),
        ({"seed": 2**63}, ValueError, "seed must be at most"),
        ({"seed": "x"}, TypeError, "seed must be an integer, got 'x'"),
        ({"stop": 5}, TypeError, "stop must be a string or a list of strings, got 5"),
        ({"stop": ["a", 1]}, TypeError, "stop must be a string or a list of strings"),
        ({"stop": ["a", ""]}, ValueError, "stop must not hold an empty string"),
        ({"stop": "a", "detokenize": False}, ValueError, "stop strings need detokenize=True"),
        ({"stop_token_ids": 3}, TypeError, "stop_token_ids must be a list of integers, got 3"),
        ({"stop_token_ids": [-1]}, ValueError, "stop_token_ids must be at least 0, got -1"),
        ({"logprobs": 21}, ValueError, "logprobs must be at most 20, got 21"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be between 1e-06 and 1e\\+06, got 0"),
        ({"presence_penalty": 2.5}, ValueError, "presence_penalty must be between -2 and 2, got 2.5"),
        ({"frequency_penalty": float("nan")}, ValueError, "frequency_penalty must be between -2 and 2, got nan"),
        ({"logit_bias": [1]}, TypeError, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {1: 101}}, ValueError, "logit_bias must be between -100 and 100, got 101"),
        ({"logit_bias": {"1": 1}}, TypeError, "logit_bias token id must be an integer, got '1'"),
        ({"allowed_token_ids": []}, ValueError, "allowed_token_ids must hold at least one id"),
        ({"allowed_token_ids": "ab"}, TypeError, "allowed_token_ids must be a list of integers"),
        ({"ignore_eos": 1}, TypeError, "ignore_eos must be True or False, got 1"),
        ({"beam_width": 4}, TypeError, "beam_width"),
    ],
)
def test_wrong_values_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**options)


def test_numpy_numbers_become_plain_ones():
    params = SamplingParams(max_tokens=np.uint8(250), top_k=np.int8(100), seed=np.int64(7), temperature=np.float32(0.5))
    assert [type(v) for v in (params.max_tokens, params.top_k, params.seed, params.temperature)] == [
        int,
        int,
        int,
        float,
    ]
    assert params.max_tokens + 200 == 450


def test_none_means_none():
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
