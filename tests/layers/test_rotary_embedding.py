from types import SimpleNamespace

import pytest
import torch

from nanovllm.layers.rotary_embedding import build_cos_sin, rope_settings


def test_table_is_cosines_then_sines_of_position_times_frequency():
    table = build_cos_sin(SimpleNamespace(rope_theta=100.0), 4, 5, torch.device("cpu"))
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SimpleNamespace(rope_parameters={"full_attention": {"rope_type": "default"}}), "by layer type"),
        (
            SimpleNamespace(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            "partial_rotary_factor 0.5",
        ),
    ],
)
def test_what_is_not_implemented_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        rope_settings(config)
