import pytest
import torch

from nanovllm.layers.embed_head import Embedding, LMHead
from nanovllm.layers.fp8 import Fp8Form, StoredFp8
from nanovllm.layers.linear import Linear, can_pack
from nanovllm.layers.ops import torch_ops
from nanovllm.layers.parallel import Ranks

CPU = torch.device("cpu")


def filled(parts, bias, dtype=torch.float32):
    linear = Linear(40, parts, bias, dtype, CPU)
    linear.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    if bias:
        linear.bias.data.normal_(generator=torch.Generator().manual_seed(2))
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 100])
def test_packed_layer_computes_the_same(rows, bias):
    linear = filled({"a": 24, "b": 9}, bias)
    expected_weight, expected_bias = linear.weight.double(), linear.bias.double() if bias else None
    linear.optimize(torch_ops())
    assert linear.packed == can_pack(torch.empty(0))
    x = torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows))
    expected = torch.nn.functional.linear(x.double(), expected_weight, expected_bias)
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_other_dtypes_stay_unpacked():
    linear = filled({"a": 8}, False, torch.bfloat16)
    linear.optimize(torch_ops())
    assert not linear.packed


def test_part_views_are_slices_in_order():
    linear = filled({"q_proj": 6, "k_proj": 2}, True)
    views = linear.part_views()
    assert list(views) == ["q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"]
    views["k_proj.weight"].fill_(5)
    views["k_proj.bias"].fill_(7)
    assert (linear.weight[6:] == 5).all()
    assert not (linear.weight[:6] == 5).any()
    assert (linear.bias[6:] == 7).all()


def test_tied_head_keeps_the_embedding_usable():
    embedding = Embedding(30, 40, torch.float32, CPU)
    embedding.weight.data.normal_()
    rows = embedding.weight[[3, 7]].clone()
    head = LMHead(30, 40, torch.float32, CPU, embedding, Ranks())
    assert head.part_views() == {}
    x = torch.randn(2, 40)
    expected = x @ embedding.weight.T
    head.optimize(torch_ops())
    torch.testing.assert_close(head(x), expected)
    assert torch.equal(embedding(torch.tensor([3, 7])), rows)


def test_parts_of_a_layer_with_inputs_of_several_scales_take_the_largest():
    """With a smaller one, what fits the other part's would be cut off."""
    stored = StoredFp8.allocate(Fp8Form(static_inputs=True), {"gate_proj": 16, "up_proj": 16}, 16, CPU)
    views = stored.views()
    views["gate_proj.input_scale"].fill_(0.25)
    views["up_proj.input_scale"].fill_(0.5)
    assert stored.finish().input_scale.tolist() == [0.5]
