"""A model small enough to be started again and again."""

import pytest

from tests.helpers import save_random_model, save_tokenizer, small_config


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tokenizer(path)
    save_random_model(path, small_config("qwen3", vocab_size=258, num_hidden_layers=1, max_position_embeddings=256))
    return str(path)
