import dataclasses

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
        ({"temperature": -0.1}, ValueError, r"temperature must be 0 \(greedy\) or more, got -0.1"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite, got nan"),
        ({"temperature": float("inf")}, ValueError, "temperature must be finite, got inf"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, got 'hot'"),
        ({"temperature": True}, TypeError, "temperature must be a number, got True"),
        ({"top_p": 0}, ValueError, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.01}, ValueError, r"top_p must be in \(0, 1\], got 1.01"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -3}, ValueError, "max_tokens must be at least 1, got -3"),
        ({"max_tokens": 2.5}, TypeError, "max_tokens must be an integer, got 2.5"),
        ({"max_tokens": None}, TypeError, "max_tokens must be an integer, got None"),
        ({"ignore_eos": 1}, TypeError, "ignore_eos must be True or False, got 1"),
        ({"beam_width": 4}, TypeError, "beam_width"),
    ],
)
def test_wrong_values_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**options)
