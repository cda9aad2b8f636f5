"""Shared test set-up: without a GPU, Triton kernels run in Triton's interpreter on the CPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton when a kernel is decorated, so before any import of one

    from tests.interpreter import round_to_float8

    round_to_float8()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder of a model small enough to be started again and again."""
    from tests.helpers import save_random_model, save_tokenizer, small_config  # imports transformers, some of it triton

    path = tmp_path_factory.mktemp("tiny")
    save_tokenizer(path)
    save_random_model(path, small_config("qwen3", vocab_size=258, num_hidden_layers=1, max_position_embeddings=256))
    return str(path)
