"""Model folders and files that are wrong, absurd or malicious: a ValueError that says what, and nothing is executed."""

import gc
import json
import pickle
import random
import shutil
import traceback

import pytest
from tokenizers import AddedToken

from nanovllm import LLM, SamplingParams
from nanovllm.utils.collector import collector_off
from tests.helpers import LIBRARY, byte_tokenizer, save_random_model, save_tokenizer, small_config
from tests.utils.test_gguf import small_model, write_model

VOCAB = 258
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    save_random_model(path, small_config("llama", vocab_size=VOCAB, num_hidden_layers=1))
    return path


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def change_json(file, **changes):
    """Set fields, or take them away where the value is None."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def refused(error):
    """Raised on purpose, by the library."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename.startswith(LIBRARY) and (frame.line or "").startswith("raise ")


HUGE = 10**12
CONFIGS = [
    ({"vocab_size": HUGE}, r"does not fit the .* GiB of free memory: weights \d+"),
    ({"hidden_size": 10**9}, "does not fit the .* GiB of free memory"),
    ({"intermediate_size": 10**11}, "no memory for the model's weights"),
    ({"num_hidden_layers": 10**9}, r"config\.json: 1000000000 layers are more than 10000"),
    ({"max_position_embeddings": HUGE}, "rotary tables for max_model_len 1000000000000 59604"),
    ({"max_position_embeddings": 0}, "max_model_len must be at least 2"),
    ({"max_position_embeddings": "x"}, r"config\.json: transformers cannot read it"),
    ({"vocab_size": 0}, "vocab_size in the model's config must be 1 or more, got 0"),
    ({"head_dim": 0}, "head_dim in the model's config must be 1 or more, got 0"),
    ({"head_dim": -2}, "head_dim in the model's config must be 1 or more, got -2"),
    ({"head_dim": 32}, r"shape \[\d+, 64\], the config asks for"),
    ({"num_key_value_heads": 0}, "num_key_value_heads in the model's config must be 1 or more, got 0"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of 3 KV heads"),
    ({"num_key_value_heads": 4}, r"k_proj\.weight' has shape \[32, 64\], the config asks for \[64, 64\]"),
    ({"num_hidden_layers": 2}, r"tensors are missing: model\.layers\.1"),
    ({"hidden_size": 32}, "the config asks for"),
    ({"vocab_size": VOCAB + 1}, r"weight' has shape \[258, 64\], the config asks for \[259, 64\]"),
    ({"rms_norm_eps": float("nan")}, r"rms_norm_eps in the model's config must be in \[0, 1\), got nan"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "infinite angles|cannot be used"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "infinite angles"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": -3}}, "rope_theta must be a positive number, got -3"),
    ({"architectures": ["../evil"]}, r"architecture \['\.\./evil'\] is not supported"),
    ({"architectures": None}, r"architecture \[\] is not supported"),
    ({"model_type": "evil"}, r"config\.json: transformers cannot read it"),
    ({"dtype": "load"}, r"dtype .* is not supported|config\.json: transformers cannot read it"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints are not supported|quant_method"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIGS, ids=lambda value: str(value)[:60])
def test_configs_that_do_not_fit_are_refused(folder, changes, message):
    if "rope_parameters" in changes:  # transformers 4 knows them under two other names
        settings = changes["rope_parameters"]
        changes = {**changes, "rope_scaling": settings, "rope_theta": settings["rope_theta"]}
    change_json(folder / "config.json", **changes)
    if changes.get("architectures", 0) is None:
        change_json(folder / "config.json", architectures=[])
    with pytest.raises(ValueError, match=message) as info:
        LLM(folder, device="cpu")
    assert refused(info.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'"x"', b'{"a": ' + b"9" * 5000 + b"}"])
def test_broken_json_is_refused_by_name(folder, name, content):
    (folder / name).write_bytes(content)
    gc.collect()  # finalisers of other tests' objects, run at the bottom of the recursion, would fail there
    with collector_off(), pytest.raises(ValueError, match=name.replace(".", r"\.")) as info:
        LLM(folder, device="cpu")
    assert refused(info.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_tokenizer_files_are_refused_by_folder(folder, name):
    (folder / name).write_bytes(b'{"version": 1')
    with pytest.raises(ValueError, match="transformers cannot read the tokenizer") as info:
        LLM(folder, device="cpu")
    assert refused(info.value)


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", 5, ["x"], None])
def test_index_cannot_lead_out_of_the_folder(folder, shard):
    (folder / "model.safetensors").rename(folder.parent / "a.safetensors")
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: ") as info:
        LLM(folder, device="cpu")
    assert refused(info.value)


def damaged(content, rng, end):
    """One of the ways in which files break, in their first `end` bytes."""
    at = rng.randrange(end)
    return rng.choice(
        [
            content[:at],
            content[:at] + rng.randbytes(8) + content[at + 8 :],
            content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
            content[:at] + content[at + rng.randint(1, 40) :],
        ]
    )


def test_damaged_safetensors_are_refused_or_run(folder):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    rng, num_refused = random.Random(1), 0
    for _ in range(80):
        file.write_bytes(damaged(content, rng, end))
        try:
            with LLM(folder, device="cpu") as llm:
                assert len(llm.generate([[1, 2]], PARAMS, use_tqdm=False)[0]["token_ids"]) == 3
        except ValueError as error:
            assert refused(error), traceback.format_exception(error)  # noqa: PT017 - some damage does not show
            num_refused += 1
    assert num_refused > 60


def test_damaged_gguf_files_are_refused_or_run(tmp_path):
    file = tmp_path / "model.gguf"
    write_model(file, small_model("llama", num_hidden_layers=1), "llama")
    content = file.read_bytes()
    rng, num_refused = random.Random(2), 0
    for _ in range(80):
        file.write_bytes(damaged(content, rng, 1600))
        try:
            with LLM(file, device="cpu", max_num_seqs=2, num_kvcache_blocks=4) as llm:
                assert len(llm.generate([[1, 2]], PARAMS, use_tqdm=False)[0]["token_ids"]) == 3
        except ValueError as error:
            assert refused(error), traceback.format_exception(error)  # noqa: PT017 - as above
            num_refused += 1
    assert num_refused > 50


def test_absurd_sizes_in_a_gguf_file(tmp_path):
    write_model(tmp_path / "m.gguf", small_model("llama"), "llama", **{"llama.block_count": 10**9})
    with pytest.raises(ValueError, match=r"m\.gguf: 1000000000 layers are more than 10000"):
        LLM(tmp_path / "m.gguf", device="cpu")
    write_model(tmp_path / "m.gguf", small_model("llama"), "llama", **{"llama.context_length": 2**32 - 1})
    with pytest.raises(ValueError, match=r"does not fit the .* GiB of free memory"):
        LLM(tmp_path / "m.gguf", device="cpu")


class Bomb:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


def test_nothing_in_a_folder_is_executed(folder, tmp_path):
    """Pickles beside the weights, code that the config points to: neither is touched."""
    trace = tmp_path / "executed"
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Bomb(trace)))
    for name in ("evil", "configuration_evil", "tokenization_evil", "__init__", "torch", "conftest"):
        (folder / f"{name}.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    change_json(folder / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    change_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})
    with LLM(folder, device="cpu") as llm:
        assert llm.generate(["a"], PARAMS, use_tqdm=False)[0]["finish_reason"] == "length"
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="found no safetensors file"):
        LLM(folder, device="cpu")
    change_json(folder / "config.json", model_type="evil")
    with pytest.raises(ValueError, match="transformers cannot read it"):
        LLM(folder, device="cpu")
    assert not trace.exists()


def test_tokenizer_with_more_ids_than_the_model(folder):
    """Texts that use them are refused by name; an end-of-sequence id among them is none the model can draw."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<new>", special=True)])
    tokenizer.eos_token = "<new>"
    tokenizer.save_pretrained(folder)
    with LLM(folder, device="cpu") as llm:
        assert llm.scheduler.eos_token_ids == frozenset()
        with pytest.raises(ValueError, match="prompt 1: token id 258 is outside the vocabulary of 258"):
            llm.generate(["a", "a<new>"], PARAMS, use_tqdm=False)
        out = llm.generate(["a"], SamplingParams(temperature=0, max_tokens=5, min_tokens=3), use_tqdm=False)[0]
        assert len(out["token_ids"]) == 5


def test_tokenizer_with_fewer_ids_than_the_model(folder):
    save_random_model(folder, small_config("llama", vocab_size=VOCAB + 40, num_hidden_layers=1))
    with LLM(folder, device="cpu") as llm:
        beyond = list(range(VOCAB, VOCAB + 40))
        params = SamplingParams(max_tokens=4, allowed_token_ids=beyond, logprobs=2, stop="x")
        out = llm.generate(["a"], params, use_tqdm=False)[0]
        assert set(out["token_ids"]) <= set(beyond)
        assert (out["text"], out["finish_reason"]) == ("", "length")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{% bad", "{{ ''.__class__.__mro__ }}", "{{ x.y.z }}"]
)
def test_chat_template_that_raises_or_reaches_out(folder, template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    with LLM(folder, device="cpu") as llm:
        with pytest.raises(ValueError, match="conversation 0: the chat template refused it") as info:
            llm.chat([{"role": "user", "content": "hi"}], PARAMS, use_tqdm=False)
        assert refused(info.value)
        assert llm.generate(["a"], PARAMS, use_tqdm=False)[0]["finish_reason"] == "length"
