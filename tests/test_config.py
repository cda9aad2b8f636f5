from dataclasses import astuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine.choices import choose_device, choose_dtype, choose_limits
from nanovllm.layers.parallel import Ranks


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_seqs": 4}, TypeError, "unknown LLM option 'max_seqs'; options are max_num_batched_tokens, max_num_seqs"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_seqs": 2.0}, TypeError, "max_num_seqs must be an integer, got 2.0"),
        ({"max_num_seqs": True}, TypeError, "max_num_seqs must be an integer, got True"),
        ({"num_kvcache_blocks": -1}, ValueError, "num_kvcache_blocks must be at least 1, got -1"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 4},
            ValueError,
            r"max_num_batched_tokens \(4\) must be at least",
        ),
        ({"kvcache_block_size": 24}, ValueError, "kvcache_block_size must be a multiple of 16, got 24"),
        ({"kvcache_block_size": 8}, ValueError, "kvcache_block_size must be at least 16, got 8"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization must be between 0 and 1, got 1.5"),
        ({"gpu_memory_utilization": "0.9"}, TypeError, "gpu_memory_utilization must be a number"),
        ({"gpu_memory_utilization": 0}, ValueError, "gpu_memory_utilization must be above 0, got 0"),
        ({"overlap": 1}, TypeError, "overlap must be True, False or None, got 1"),
        ({"paced_prompts": "yes"}, TypeError, "paced_prompts must be True, False or None, got 'yes'"),
        ({"device": None}, TypeError, "device must be a string"),
        ({"dtype": np.array(["float32"])}, ValueError, "dtype must be one of"),
        ({"enforce_eager": 1}, TypeError, "enforce_eager must be True or False, got 1"),
        ({"dtype": "int8"}, ValueError, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"load_format": "pt"}, ValueError, "load_format must be one of auto, dummy, got 'pt'"),
        ({"attention_backend": "magic"}, ValueError, "attention_backend must be one of"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size must be at least 1, got 0"),
        ({"tensor_parallel_size": 9}, ValueError, "tensor_parallel_size must be at most 8, got 9"),
        ({"max_num_seqs": 2**16 + 1}, ValueError, "max_num_seqs must be at most 65536, got 65537"),
        ({"seed": 2**63}, ValueError, "seed must be at most"),
    ],
)
def test_wrong_options_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        Config.build("model", options)


def test_numpy_numbers_become_plain_ones():
    config = Config.build(
        "model", {"max_num_seqs": np.uint8(200), "seed": np.int64(7), "kvcache_block_size": np.int8(32)}
    )
    assert [type(v) for v in (config.max_num_seqs, config.seed, config.kvcache_block_size)] == [int, int, int]


def test_model_must_be_a_path_or_an_id():
    with pytest.raises(TypeError, match="model must be a path or a Hub id, got 3"):
        Config.build(3, {})


def config_with(dtype):
    return type("HFConfig", (), {"dtype": dtype, "max_position_embeddings": 100})()


def test_dtype_follows_the_checkpoint_where_the_machine_is_fast_in_it(caplog, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert choose_dtype("auto", config_with(torch.float32), cpu) is torch.float32
    assert not caplog.records
    assert choose_dtype("auto", config_with(torch.bfloat16), cpu) is torch.float32
    assert choose_dtype("auto", config_with("float16"), cpu) is torch.float32
    assert len(caplog.records) == 2
    assert "using torch.float32" in caplog.text
    assert choose_dtype("bfloat16", config_with(torch.float32), cpu) is torch.bfloat16
    with pytest.raises(ValueError, match=r"dtype torch\.int8 is not supported"):
        choose_dtype("auto", config_with("int8"), cpu)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert choose_dtype("auto", config_with(torch.bfloat16), cpu) is torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    assert choose_dtype("auto", config_with(torch.bfloat16), torch.device("cuda")) is torch.float16


def test_limits():
    cpu = torch.device("cpu")
    spec = SimpleNamespace(hf_config=config_with("float32"), max_positions=100, max_positions_note=" (and why)")

    def limits(device=cpu, **options):
        return astuple(choose_limits(Config(model="m", **options), spec, device))

    assert limits() == (64, 1024, 100)
    assert limits(max_num_batched_tokens=8) == (8, 8, 100)
    assert limits(max_num_seqs=5000) == (5000, 5000, 100)
    assert limits(torch.device("cuda"), max_model_len=50) == (512, 16384, 50)
    with pytest.raises(ValueError, match=r"max_model_len 101 exceeds the model's window of 100 tokens \(and why"):
        limits(max_model_len=101)
    with pytest.raises(ValueError, match="max_model_len must be at least 2"):
        limits(max_model_len=1)


def test_device_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", Ranks()) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"device 'cuda' was asked for, but torch .* sees no GPU"):
        choose_device("cuda", Ranks())
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda, got 'meta'"):
        choose_device("meta", Ranks())
    with pytest.raises(ValueError, match="device 'warp' is not known to torch"):
        choose_device("warp", Ranks())


def test_gpus_have_numbers(monkeypatch):
    """A device without one is this thread's current GPU; several ranks begin at the first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert choose_device("cuda", Ranks()) == choose_device("auto", Ranks()) == torch.device("cuda:2")
    assert choose_device("cuda:1", Ranks()) == torch.device("cuda:1")
    assert [choose_device("cuda", Ranks(rank, 2)).index for rank in (0, 1)] == [0, 1]
    assert choose_device("cuda:1", Ranks(1, 2)) == torch.device("cuda:2")
    with pytest.raises(ValueError, match="device 'cuda:3' was asked for, but torch sees 3 GPUs"):
        choose_device("cuda:3", Ranks())
    with pytest.raises(ValueError, match="tensor_parallel_size 2 needs as many GPUs from cuda:2 on, torch sees 3"):
        choose_device("cuda:2", Ranks(0, 2))
