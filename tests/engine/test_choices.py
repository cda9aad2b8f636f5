import pytest
import torch
from torch import nn

from nanovllm import LLM
from nanovllm.config import Limits
from nanovllm.engine import choices
from nanovllm.engine.choices import choose_pacer, weight_bytes
from nanovllm.layers.fp8 import Fp8Weight
from nanovllm.layers.linear import Linear
from tests.helpers import save_random_model, save_tokenizer, small_config


def float8_layer():
    layer = Linear(64, {"up_proj": 32}, False, torch.float32, torch.device("cpu"))
    layer.fp8 = Fp8Weight.quantize(torch.randn(32, 64))
    layer.weight.data = layer.weight.new_empty(0)
    return layer


def test_weights_in_float8_count_a_byte_each():
    assert weight_bytes(nn.Sequential(nn.Linear(16, 16, bias=False), float8_layer())) == 4 * 16 * 16 + 32 * 64


@pytest.mark.parametrize(
    ("asked", "limit", "has_experts", "spreads"),
    [(None, 1024, False, True), (None, 1025, False, False), (None, 1024, True, False), (True, 1025, True, True)],
)
def test_sequences_may_start_later_where_there_is_much_to_read(asked, limit, has_experts, spreads, monkeypatch):
    monkeypatch.setattr(choices, "PACED_WEIGHTS", limit)
    pacer = choose_pacer(asked, nn.Linear(16, 16, bias=False), has_experts, Limits(8, 512, 100))
    assert pacer.spreads is spreads
    assert pacer.graph_tokens == 8 + 256


def test_paced_prompts_is_refused_where_graphs_hold_no_prompts(tmp_path):
    save_random_model(tmp_path, small_config("qwen3"))
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"paced_prompts needs CUDA graphs"):
        LLM(tmp_path, device="cpu", paced_prompts=True)


def test_only_generate_lets_sequences_wait_for_each_other(tmp_path, monkeypatch):
    save_random_model(tmp_path, small_config("qwen3", vocab_size=258))
    save_tokenizer(tmp_path)
    with LLM(tmp_path, device="cpu", num_kvcache_blocks=20) as llm:
        added, add = [], llm.scheduler.add
        monkeypatch.setattr(llm.scheduler, "add", lambda seq: (added.append(seq), add(seq)))
        for _ in range(2):
            llm.generate([[1, 2], [3]], use_tqdm=False)
        list(llm.stream([[1, 2]]))
        llm.add_request([1, 2])
        batches = [seq.batch for seq in added]
    assert batches[0] == batches[1] is not None
    assert batches[2] == batches[3] is not None
    assert batches[0] != batches[2]
    assert batches[4:] == [None, None]
