"""Which layers are left to compile and load kernels with."""

import pytest

from nanovllm import LLM
from nanovllm.engine.few_layers import few_layers
from tests.helpers import save_random_model, small_config

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("kinds", "left"),
    [
        ([FULL], [0]),
        ([FULL] * 5, [0, 4]),
        ([SLIDING, SLIDING, FULL, SLIDING, SLIDING], [0, 2, 4]),
        ([SLIDING, SLIDING, SLIDING, FULL], [0, 3]),
    ],
)
def test_the_first_of_each_kind_and_the_last(kinds, left, tmp_path):
    config = small_config("gemma3", num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=20)
    save_random_model(tmp_path, config)
    with LLM(tmp_path, dtype="float32", device="cpu", num_kvcache_blocks=8) as llm:
        model = llm.model_runner.model
        layers = list(model.model.layers)
        with few_layers(model):
            assert [layer.self_attn.layer for layer in model.model.layers] == left
        assert list(model.model.layers) == layers
