"""float8 linear layers: quantised on the way in, and checkpoints in each form, against transformers in float32."""

import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import fp8_reference
from nanovllm.kernels.reference import FP8
from nanovllm.layers.fp8 import dequantize_blocks
from nanovllm.utils.quantization import Quantization
from tests.helpers import CONFIGS, engine_logits, random_prompt, save_random_model, small_config

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
FAMILIES = [name for name in CONFIGS if name != "qwen3_moe" and CONFIGS[name] is not None]
SIZES = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
FLIPS = 0.025  # a value that falls on the other side of a float8 step, for a last bit of float32, is a step away
PROMPT = random_prompt(40, 1)


def logits_of(folder, **options):
    with LLM(folder, device="cpu", num_kvcache_blocks=20, **{"dtype": "float32", **options}) as llm:
        return engine_logits(llm, PROMPT)


def difference(logits, expected):
    return ((logits - expected).norm() / expected.norm()).item()


def is_linear(name):
    return name.endswith(".weight") and name.split(".")[-2] in LINEARS


@torch.inference_mode()
def run_transformers(folder, weights, input_scales=None):
    """Logits in float32 on given weights, with inputs of linear layers rounded to float8 (None: as they are).

    input_scales: by layer; a layer whose scale is "dynamic" takes a scale per token.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing = model.load_state_dict({name: w.float() for name, w in weights.items()}, strict=False).missing_keys
    assert not missing

    def round_input(scale):
        def hook(module, args):
            (x,) = args
            values, scales = fp8_reference.quantize_rows(x.flatten(0, -2), None if scale == "dynamic" else scale)
            return ((values.float() * scales[:, None]).view(x.shape),)

        return hook

    for name, scale in (input_scales or {}).items():
        model.get_submodule(name).register_forward_pre_hook(round_input(scale))
    return model(torch.tensor([PROMPT])).logits[0]


def save_float8(folder, form, ignored=(), static=False, family="llama", sizes=None, seed=0):
    """Rewrite a random checkpoint in `form`: tensor, channel or block.

    Returns (dequantised weights, scales of the layers' inputs) for `run_transformers`."""
    save_random_model(folder, small_config(family, **(sizes or SIZES)), seed)
    tensors = load_file(folder / "model.safetensors")
    dense, inputs, stored = dict(tensors), {}, {}
    for name, weight in tensors.items():
        layer = name.removesuffix(".weight")
        if not is_linear(name) or any(entry in layer for entry in ignored):
            stored[name] = weight
            continue
        if form == "block":
            high, wide = (-(-size // 128) for size in weight.shape)
            padded = torch.zeros(high * 128, wide * 128)
            padded[: weight.shape[0], : weight.shape[1]] = weight
            scales = padded.view(high, 128, wide, 128).abs().amax(dim=(1, 3)) / 448
            whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
            stored[layer + ".weight_scale_inv"] = scales
        else:
            scales = weight.abs().amax(dim=1, keepdim=True) / 448
            whole = scales if form == "channel" else scales.max()
            stored[layer + ".weight_scale"] = whole.clone()
        stored[name] = (weight / whole).to(FP8)
        dense[name] = stored[name].float() * whole
        inputs[layer] = "dynamic"
        if static:
            inputs[layer] = stored[layer + ".input_scale"] = torch.tensor(0.02)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return dense, inputs


def set_config(folder, quantization):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def compressed(strategy="channel", static=False, ignore=("lm_head",), **changes):
    tensor = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = {**tensor, "dynamic": not static, "strategy": "tensor" if static else "token"}
    group = {"targets": ["Linear"], "weights": {**tensor, "strategy": strategy, "dynamic": False}}
    group["input_activations"] = inputs
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return {**config, "ignore": list(ignore), **changes}


@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_fly_is_the_product_of_rounded_weights_and_inputs(tmp_path, family):
    save_random_model(tmp_path, small_config(family))
    weights = load_file(tmp_path / "model.safetensors")
    exact = run_transformers(tmp_path, weights)
    inputs = {}
    for name in filter(is_linear, weights):
        values, scales = fp8_reference.quantize_weight(weights[name])
        weights[name] = values.float() * scales[:, None]
        inputs[name.removesuffix(".weight")] = "dynamic"
    logits = logits_of(tmp_path, quantization="fp8")
    assert difference(logits, run_transformers(tmp_path, weights, inputs)) < FLIPS
    assert 0.01 < difference(logits, exact) < 0.3


def test_cached_chunked_and_alone_the_tokens_are_the_same(tmp_path):
    save_random_model(tmp_path, small_config("qwen3"))
    prompts = [random_prompt(n, n) for n in (1, 17, 40, 100)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    runs = []
    for options in ({}, {"max_num_batched_tokens": 16}, {"enable_prefix_caching": False, "max_num_seqs": 1}):
        options = {"quantization": "fp8", "kv_cache_dtype": "fp8", "dtype": "float32", "max_num_seqs": 4, **options}
        with LLM(tmp_path, device="cpu", num_kvcache_blocks=80, **options) as llm:
            for _ in range(2):
                runs.append([out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)])
    assert all(run == runs[0] for run in runs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernels natively")
def test_the_kernels_give_the_same_in_the_interpreter(tmp_path):
    save_random_model(tmp_path, small_config("qwen2", num_hidden_layers=1))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [random_prompt(7, 1), random_prompt(3, 2)]
    runs = []
    for backend in ("torch", "triton"):
        options = {"quantization": "fp8", "attention_backend": backend, "max_num_batched_tokens": 16, "max_num_seqs": 4}
        with LLM(tmp_path, device="cpu", dtype="float32", num_kvcache_blocks=20, **options) as llm:
            runs.append(llm.generate(prompts, params, use_tqdm=False))
    for with_graphs, without in zip(*runs, strict=True):
        check_equal_up_to_a_tie(with_graphs, without, 0.15)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("form", ["tensor", "channel"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_compressed_tensors(tmp_path, form, static, family):
    sizes = SIZES if family == "llama" else {key: SIZES[key] for key in ("hidden_size", "intermediate_size")}
    dense, inputs = save_float8(tmp_path, form, static=static, family=family, sizes=sizes)
    set_config(tmp_path, compressed(form, static))
    expected = run_transformers(tmp_path, dense, inputs)
    logits = logits_of(tmp_path)
    assert difference(logits, expected) < FLIPS
    assert difference(logits, run_transformers(tmp_path, load_dense(family, sizes, tmp_path / "exact"))) > 4 * FLIPS


def load_dense(family, sizes, folder):
    """The weights that `save_float8` starts from."""
    folder.mkdir()
    save_random_model(folder, small_config(family, **sizes))
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("static", [False, True])
def test_quant_method_fp8_with_tensor_scales(tmp_path, static):
    dense, inputs = save_float8(tmp_path, "tensor", static=static)
    scheme = "static" if static else "dynamic"
    set_config(tmp_path, {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]})
    assert difference(logits_of(tmp_path), run_transformers(tmp_path, dense, inputs)) < FLIPS


def test_blocks_become_rows_at_a_bounded_cost(tmp_path):
    dense, inputs = save_float8(tmp_path, "block")
    set_config(
        tmp_path,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    )
    logits = logits_of(tmp_path)
    again = {name: requantized(weight) if is_linear(name) else weight for name, weight in dense.items()}
    assert difference(logits, run_transformers(tmp_path, again, inputs)) < FLIPS
    error = [((again[n] - dense[n]).norm() / dense[n].norm()).item() for n in filter(is_linear, dense)]
    assert 0.01 < max(error) < 0.03
    assert difference(logits, run_transformers(tmp_path, dense, inputs)) < 0.3


def requantized(weight):
    values, scales = fp8_reference.quantize_weight(weight)
    return values.float() * scales[:, None]


def test_blocks_are_cut_at_the_ends():
    values, scales = torch.randn(130, 200).to(FP8), torch.rand(2, 2) + 1
    dense = dequantize_blocks(values, scales, (128, 128))
    for i, j in ((0, 0), (127, 127), (128, 127), (0, 128), (129, 199)):
        assert dense[i, j] == values[i, j].float() * scales[i // 128, j // 128]


@pytest.mark.parametrize("entry", ["layers.1.mlp", "down_proj", "o_proj"])
def test_ignored_layers_stay_as_they_are(tmp_path, entry):
    dense, inputs = save_float8(tmp_path, "channel", ignored=[entry])
    assert 0 < len(inputs) < 14
    name = {"layers.1.mlp": "model.layers.1.mlp", "down_proj": "re:.*down_proj", "o_proj": "o_proj"}[entry]
    set_config(tmp_path, compressed(ignore=["lm_head", name]))
    assert difference(logits_of(tmp_path), run_transformers(tmp_path, dense, inputs)) < FLIPS


@pytest.mark.parametrize(
    ("entry", "layer", "ignored"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("up_proj", "model.layers.11.mlp.gate_up_proj", False),
        ("mlp.up_proj", "model.layers.0.mlp.up_proj", True),
        ("re:.*mlp.*", "model.layers.0.mlp.up_proj", True),
        ("re:mlp", "model.layers.0.mlp.up_proj", False),
    ],
)
def test_what_an_entry_names(entry, layer, ignored):
    assert Quantization(ignored=(entry,)).ignores(layer) is ignored


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq' are not supported, only fp8, compressed-tensors"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": "fp8"}, "activation_scheme None is not supported, only 'dynamic', 'static'"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128]}, "weight_block_size must"),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}, "scheme 'static'"),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": "lm_head"},
            "must be a list",
        ),
        (["fp8"], "quantization_config: it must be an object|cannot read it"),
        ({"quant_method": ["fp8"]}, r"quant_method \['fp8'\]|cannot read it"),
        (compressed(config_groups=[1]), "config_groups must be an object"),
        (compressed(config_groups={"a": 1}), "a group must be an object"),
        (compressed(config_groups={"a": {"targets": ["Linear"], "weights": "x"}}), "weights must be an object"),
        (compressed(ignore=["re:("]), r"'re:\(' is no regular expression"),
        (compressed("block"), "strategy 'block' is not supported, only 'tensor', 'channel'"),
        (compressed(format="pack-quantized"), "format 'pack-quantized'"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(config_groups={}), "only one of config_groups"),
        (compressed(ignore=["lm_head", "re:.*q_proj"]), r"self_attn has \['q_proj'\] not in float8, but the rest of"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path, quantization, message):
    small_config("llama").save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    set_config(tmp_path, quantization)
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, device="cpu")


def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path):
    save_float8(tmp_path, "channel")
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=r"weight.* has dtype torch\.float8_e4m3fn; quantised weights are not|_scale"):
        LLM(tmp_path, device="cpu")
    set_config(tmp_path, compressed())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, name: tensors[name].float()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"up_proj\.weight' has dtype torch\.float32, the config asks"):
        LLM(tmp_path, device="cpu")
    save_file({**tensors, name + "_scale": torch.ones(7)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"up_proj\.weight_scale' has shape \[7\], the config asks for \[320\]"):
        LLM(tmp_path, device="cpu")
    del tensors[name + "_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 of \d+ tensors are missing: model\.layers\.0\.mlp\.up_proj\.weight_scale"):
        LLM(tmp_path, device="cpu")


def test_options_are_checked_and_what_is_active_is_logged(tmp_path, caplog):
    with pytest.raises(ValueError, match="quantization must be None or one of fp8, got 'int4'"):
        LLM(tmp_path, quantization="int4")
    moe, odd = tmp_path / "moe", tmp_path / "odd"
    save_random_model(moe, small_config("qwen3_moe"))
    with pytest.raises(ValueError, match="float8 weights are not supported for models with experts"):
        LLM(moe, device="cpu", quantization="fp8")
    save_random_model(odd, small_config("llama", intermediate_size=40))
    with pytest.raises(ValueError, match=r"sizes are multiples of 16, not \[80, 64\]|not \[64, 40\]"):
        LLM(odd, device="cpu", quantization="fp8", num_kvcache_blocks=20)
    save_random_model(tmp_path, small_config("llama"))
    with caplog.at_level(logging.INFO, "nanovllm"), LLM(tmp_path, device="cpu", quantization="fp8") as llm:
        weights = [m for m in llm.model_runner.model.modules() if getattr(m, "fp8", None) is not None]
    assert len(weights) == 8
    assert "with float8 linear layers, quantised when loaded" in caplog.text


def test_dummy_weights_of_a_float8_checkpoint(tmp_path):
    small_config("llama").save_pretrained(tmp_path)
    set_config(tmp_path, compressed())
    assert logits_of(tmp_path, load_format="dummy").isfinite().all()


def check_equal_up_to_a_tie(one, other, tolerance):
    """The same greedy tokens up to where, in either's own view, the two choices are as good as equal.

    A graph's surplus rows let attention split sequences elsewhere, and float8 rounds a last bit up to a sixteenth.
    """
    for i, (a, b) in enumerate(zip(one["token_ids"], other["token_ids"], strict=True)):
        if a != b:
            for entry in (one["logprobs"][i], other["logprobs"][i]):
                assert abs(entry[a]["logprob"] - entry[b]["logprob"]) < tolerance
            return


@pytest.mark.gpu
def test_a_gpu_with_graphs_and_without_gives_the_same_and_what_a_cpu_does(tmp_path):
    save_random_model(tmp_path, small_config("qwen2", hidden_size=256, intermediate_size=512))
    on_cpu = logits_of(tmp_path, quantization="fp8", dtype="bfloat16")
    prompts = [random_prompt(n, n) for n in (1, 17, 40, 100, 30)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=5)
    runs = []
    for eager in (False, True):
        options = {"quantization": "fp8", "kv_cache_dtype": "fp8", "enforce_eager": eager, "max_num_seqs": 8}
        with LLM(tmp_path, dtype="bfloat16", num_kvcache_blocks=20, **options) as llm:
            runs.append(llm.generate(prompts, params, use_tqdm=False))
    for with_graphs, without in zip(*runs, strict=True):
        check_equal_up_to_a_tie(with_graphs, without, 0.15)
    with LLM(tmp_path, dtype="bfloat16", quantization="fp8", num_kvcache_blocks=20) as llm:
        assert difference(engine_logits(llm, PROMPT), on_cpu) < 0.15


@pytest.mark.gpu
def test_what_a_gpu_cannot_is_refused(tmp_path):
    save_random_model(tmp_path, small_config("llama"))
    with pytest.raises(ValueError, match="float8 weights need dtype 'bfloat16' on a GPU, not 'float32'"):
        LLM(tmp_path, dtype="float32", quantization="fp8")
