import math
from types import SimpleNamespace

import pytest
import torch

from nanovllm.layers.rotary_embedding import (
    LongRope,
    build_cos_sin,
    head_order,
    inverse_frequencies,
    long_rope,
    rope_settings,
    rotary_dim,
)


def test_table_is_cosines_then_sines_of_position_times_frequency():
    config = SimpleNamespace(rope_theta=100.0)
    table = build_cos_sin(config, rope_settings(config), 4, 5, torch.device("cpu"))
    for position in range(5):
        angles = torch.tensor([position * 1.0, position * 0.1])  # 100 ** (-0/4), 100 ** (-2/4)
        torch.testing.assert_close(table[position], torch.cat([angles.cos(), angles.sin()]))


def test_settings_in_both_forms_of_transformers():
    old = SimpleNamespace(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = SimpleNamespace(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    for config in (old, new):
        settings = rope_settings(config)
        assert (settings["rope_type"], settings["rope_theta"], settings["factor"]) == ("linear", 5e5, 2.0)
    assert rope_settings(SimpleNamespace(rope_theta=7.0, rope_scaling=None))["rope_type"] == "default"


def test_settings_by_kind_of_layer_in_both_forms():
    scaled = {"rope_type": "linear", "factor": 2.0}
    old = SimpleNamespace(rope_theta=5e5, rope_scaling=scaled, rope_local_base_freq=100.0)
    new = SimpleNamespace(
        rope_parameters={
            "full_attention": {**scaled, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }
    )
    for config in (old, new):
        full, local = rope_settings(config, "full_attention"), rope_settings(config, "sliding_attention")
        assert (full["rope_type"], full["rope_theta"], full["factor"]) == ("linear", 5e5, 2.0)
        assert (local["rope_type"], local["rope_theta"]) == ("default", 100.0)
    del old.rope_local_base_freq
    assert rope_settings(old, "sliding_attention")["rope_theta"] == 5e5


def test_a_head_rotated_in_part_gives_the_same_scores_in_its_new_order():
    config = SimpleNamespace(rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.75})
    settings = rope_settings(config)
    turning = rotary_dim(settings, 16)
    assert turning == 12
    table = build_cos_sin(config, settings, 16, 9, torch.device("cpu"))
    order = head_order(16, turning)
    assert order.sort().values.tolist() == list(range(16))
    q, k = torch.randn(2, 16)

    def rotate_all(x, position):
        low, high = x[order].chunk(2)
        cos, sin = table[position].chunk(2)
        return torch.cat([low * cos - high * sin, high * cos + low * sin])

    def rotate_part(x, position):
        angles = position / 100.0 ** (torch.arange(0, 12, 2) / 12)
        low, high, still = x.split([6, 6, 4])
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin(), still])

    torch.testing.assert_close(rotate_all(q, 8) @ rotate_all(k, 3), rotate_part(q, 8) @ rotate_part(k, 3))


def test_the_lengths_from_which_sequences_have_the_second_table():
    def of(max_len, rope_type="longrope"):
        return long_rope({"rope_type": rope_type, "original_max_position_embeddings": 64}, max_len)

    assert of(65) is None  # the last token is not computed
    assert of(66) == LongRope(64, 66)
    assert of(200, "yarn") is None
    assert [of(200).offset_for(max_len) for max_len in (1, 64, 65, 66, 200)] == [0, 0, 0, 200, 200]


def test_the_second_table_has_the_long_factors():
    factors = {"short_factor": [1.0, 2.0], "long_factor": [4.0, 50.0]}
    parameters = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 64, **factors}
    config = SimpleNamespace(
        rope_parameters=parameters, max_position_embeddings=256, original_max_position_embeddings=64
    )
    settings = rope_settings(config)
    table = build_cos_sin(config, settings, 4, 200, torch.device("cpu"), long_rope(settings, 200))
    assert table.shape == (400, 4)
    attention_factor = (1 + math.log(4) / math.log(64)) ** 0.5
    for first, divisors in ((0, [1.0, 20.0]), (200, [4.0, 500.0])):
        angles = torch.arange(200)[:, None] / torch.tensor(divisors)
        expected = torch.cat([angles.cos(), angles.sin()], dim=1) * attention_factor
        torch.testing.assert_close(table[first : first + 200], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"full_attention": {"rope_type": "default"}}, "by layer type"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor 0.3 does not rotate an even number of 10"),
        ({"partial_rotary_factor": "all"}, "partial_rotary_factor 'all'"),
        ({"rope_type": "spiral"}, "rope scaling 'spiral' is not supported; supported are default, linear, dynamic,"),
        ({"rope_type": "linear"}, "rope settings .* cannot be used: KeyError.*factor"),
        ({"rope_type": "linear", "factor": 0.0}, "infinite angles"),
        (
            {"rope_type": "yarn", "factor": 2.0, "attention_factor": "a"},
            "rope settings .* cannot be used: ValueError.*could not convert",
        ),
        ({"rope_theta": -1}, "rope_theta must be a positive number, got -1"),
    ],
)
def test_what_is_not_implemented_is_refused(parameters, message):
    config = SimpleNamespace(rope_parameters={"rope_theta": 1e4, **parameters}, max_position_embeddings=64)
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(config, rope_settings(config), 10)


def test_a_kind_of_layer_without_settings_is_refused():
    config = SimpleNamespace(rope_parameters={"full_attention": {"rope_type": "default"}, "sliding_attention": None})
    with pytest.raises(ValueError, match="rope settings of sliding_attention layers must be a dict, got None"):
        rope_settings(config, "sliding_attention")
