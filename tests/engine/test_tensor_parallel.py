"""A model over several processes gives the tokens that one gives, whatever is asked of it."""

import os
import signal
import threading

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.worker import ROOM
from nanovllm.engine.worker_watch import WorkerWatch
from tests.engine.test_backends import count_shared_passes
from tests.helpers import random_prompt, save_random_model, save_tokenizer, small_config

PROMPTS = [[7, 8, 9] * 9, [5] * 40, [3, 4], [11, 12, 13, 14] * 12, [20], [7, 8, 9] * 9 + [1]]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
REQUESTS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True),
    "filtered": SamplingParams(temperature=1.1, top_k=20, top_p=0.9, min_p=0.01, max_tokens=20, ignore_eos=True),
    "penalised": SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
                                max_tokens=20, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, logprobs=3, max_tokens=12, ignore_eos=True),
    "prompt logprobs": SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=8, ignore_eos=True),
    "edited": SamplingParams(temperature=0.5, logit_bias={65: 3.0}, bad_words=["ab"], min_tokens=3, max_tokens=20),
    "allowed": SamplingParams(temperature=1, allowed_token_ids=[60, 70, 80, 250], max_tokens=9, ignore_eos=True),
    "several": SamplingParams(temperature=1, n=3, max_tokens=9, ignore_eos=True),
    "stop": SamplingParams(temperature=1, seed=1, stop=["e", "t"], max_tokens=40),
    "grammar": SamplingParams(temperature=1, seed=5, regex="[a-f]{4,9}", max_tokens=12),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    save_random_model(path, small_config("qwen3", vocab_size=258, num_attention_heads=4), seed=3)
    return path


@pytest.fixture(scope="module", params=[2, 4])
def llms(request, folder):
    """The same with one rank and with several."""
    options = {"device": "cpu", "max_num_seqs": 8, "num_kvcache_blocks": 60}
    with LLM(folder, **options) as one, LLM(folder, tensor_parallel_size=request.param, **options) as several:
        yield one, several


def completions(llm, prompts, params):
    outs = llm.generate(prompts, params, use_tqdm=False)
    return [[(c["token_ids"], c["text"], c["finish_reason"]) for c in out.get("completions", [out])] for out in outs]


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("llms", [2], indirect=True)
def test_same_completions_as_one_rank(llms, kind):
    one, several = llms
    assert completions(several, PROMPTS, REQUESTS[kind]) == completions(one, PROMPTS, REQUESTS[kind])


def test_all_kinds_together(llms):
    """Steps that have plain, edited and scored rows, prompts and decodes."""
    params = list(REQUESTS.values())
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    one, several = (completions(llm, prompts, params) for llm in llms)
    assert several == one


@pytest.mark.parametrize("kind", ["logprobs", "prompt logprobs"])
def test_same_log_probabilities(llms, kind):
    one, several = (llm.generate(PROMPTS, REQUESTS[kind], use_tqdm=False) for llm in llms)
    name = kind.replace(" ", "_")
    for mine, theirs in zip(several, one, strict=True):
        assert len(mine[name]) == len(theirs[name]) > 0
        for a, b in zip(mine[name], theirs[name], strict=True):
            if b is None:
                assert a is None
                continue
            assert a.keys() == b.keys()
            for token in a:
                assert a[token]["logprob"] == pytest.approx(b[token]["logprob"], abs=1e-4)


def test_prefix_hits_are_the_same(llms):
    for llm in llms:
        llm.reset_prefix_cache()
        llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
    outs = [llm.generate([PROMPTS[3], [*PROMPTS[3], 5]], GREEDY, use_tqdm=False) for llm in llms]
    assert [out["num_cached_tokens"] for out in outs[1]] == [out["num_cached_tokens"] for out in outs[0]] == [32, 48]
    assert [out["token_ids"] for out in outs[1]] == [out["token_ids"] for out in outs[0]]


@pytest.mark.parametrize(("size", "overlap"), [(2, False), (2, True), (4, True)])
def test_preemption_chunks_and_overlap(folder, size, overlap):
    """A pool that is too small, prompts in pieces of 16 tokens, sampled."""
    options = {"device": "cpu", "max_num_seqs": 4, "num_kvcache_blocks": 8, "max_num_batched_tokens": 16}
    params = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True)
    with LLM(folder, **options) as one:
        expected = completions(one, PROMPTS, params)
    with LLM(folder, tensor_parallel_size=size, overlap=overlap, **options) as several:
        assert completions(several, PROMPTS, params) == expected
        assert several.stats()["preemptions"] > 0
        several.scheduler.block_manager.check_integrity([])


FAMILIES = {
    "gemma3": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    """Logits of all families are compared in tests/models/test_split.py, in threads."""
    save_random_model(tmp_path, small_config(family, **FAMILIES[family]))
    options = {"device": "cpu", "num_kvcache_blocks": 40, "max_num_seqs": 8}
    with LLM(tmp_path, **options) as one:
        expected = completions(one, PROMPTS, GREEDY)
    with LLM(tmp_path, tensor_parallel_size=2, **options) as several:
        assert completions(several, PROMPTS, GREEDY) == expected


def test_all_ranks_have_as_many_blocks_as_the_smallest_has_room_for(folder, monkeypatch):
    wait_for = WorkerWatch.wait_for

    def little(watch, kind):
        return [(7, text) for _, text in wait_for(watch, kind)] if kind == ROOM else wait_for(watch, kind)

    monkeypatch.setattr(WorkerWatch, "wait_for", little)
    with LLM(folder, device="cpu", tensor_parallel_size=2, max_num_seqs=8, num_kvcache_blocks=60) as llm:
        assert llm.stats()["kv_blocks"] == 7
        assert llm.model_runner.kv_cache.shape[2] == 8  # one is for padding


def test_dummy_weights(tmp_path):
    """What has to be the same on all ranks is, so that they go the same way: tokens in the vocabulary, every time."""
    moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    small_config("qwen3_moe", **moe).save_pretrained(tmp_path)
    options = {"device": "cpu", "num_kvcache_blocks": 40, "max_num_seqs": 8, "load_format": "dummy"}
    outs = []
    for _ in range(2):
        with LLM(tmp_path, tensor_parallel_size=2, **options) as llm:
            outs.append(completions(llm, PROMPTS, GREEDY))
            gates = [layer.mlp.gate for layer in llm.model_runner.model.model.layers]
            assert not any(gate.held for gate in gates)
    assert outs[0] == outs[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernels natively")
def test_shared_prefixes_in_the_interpreter(tmp_path, monkeypatch):
    """On both ranks: the pass is part of rank 0's logits, and the other's are added to them."""
    save_random_model(tmp_path, small_config("qwen3", num_hidden_layers=1))
    launches = count_shared_passes(monkeypatch)
    prefix = random_prompt(144, 1)
    prompts = [[*prefix, i] for i in range(4)] + [random_prompt(20, 2)]
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 256, "kvcache_block_size": 16, "num_kvcache_blocks": 60}
    params = [SamplingParams(temperature=t, seed=2, max_tokens=4, ignore_eos=True) for t in (0, 1, 0, 1, 1)]
    with LLM(tmp_path, device="cpu", **options) as one:
        expected = completions(one, prompts, params)
    with LLM(tmp_path, device="cpu", attention_backend="triton", tensor_parallel_size=2, **options) as several:
        assert completions(several, prompts, params) == expected
        assert several._step_builder._shared_prefixes.num_found > 0
    assert launches[-1] >= 3


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_eight_bits(tmp_path, options):
    """Each rank has scales of its own for what it has a part of, so last bits differ: first tokens do not here."""
    save_random_model(tmp_path, small_config("qwen3", intermediate_size=96), seed=3)
    options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 60, "max_num_seqs": 8, **options}
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    outs = []
    for size in (1, 2):
        with LLM(tmp_path, tensor_parallel_size=size, **options) as llm:
            outs.append(llm.generate(PROMPTS, params, use_tqdm=False))
            if "kv_cache_dtype" in options:
                scales = llm.model_runner.kv_scales
                assert scales.shape == (2, 2, 2 // size)
                assert (scales.log2() % 1 == 0).all()
    for one, two in zip(*outs, strict=True):
        assert two["token_ids"][0] == one["token_ids"][0]
        values = [next(iter(out["logprobs"][0].values()))["logprob"] for out in (one, two)]
        assert values[1] == pytest.approx(values[0], abs=0.1)


def test_checkpoint_in_float8_is_refused(tmp_path):
    config = small_config("qwen3")
    config.quantization_config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="stored in float8 cannot be split over tensor_parallel_size 2 GPUs; one in"):
        LLM(tmp_path, tensor_parallel_size=2, device="cpu", load_format="dummy")


# ---- on GPUs -----------------------------------------------------------------------------------------------

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("eager", [False, True])
def test_two_gpus_give_the_tokens_of_one(folder, eager):
    """Graphs hold the collectives; edited and scored steps gather logits outside of them."""
    options = {"dtype": "float32", "num_kvcache_blocks": 60, "max_num_seqs": 8, "enforce_eager": eager}
    options["kvcache_block_size"] = 16
    kinds = [kind for kind in REQUESTS if kind != "grammar"]
    with LLM(folder, **options) as one:
        expected = {kind: completions(one, PROMPTS, REQUESTS[kind]) for kind in kinds}
    with LLM(folder, tensor_parallel_size=2, **options) as several:
        assert (several.model_runner.graphs is None) == eager
        for kind in kinds:
            assert completions(several, PROMPTS, REQUESTS[kind]) == expected[kind], kind


@pytest.mark.gpu
@two_gpus
def test_killed_worker_on_a_gpu_is_noticed_and_gives_its_memory_back(folder):
    llm = LLM(folder, dtype="float32", tensor_parallel_size=2, num_kvcache_blocks=60, max_num_seqs=8)
    pid = llm.model_runner._workers.processes[0].pid
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
        llm.generate(PROMPTS * 1000, SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)
    llm.close()
    with LLM(folder, dtype="float32", tensor_parallel_size=2, num_kvcache_blocks=60, max_num_seqs=8) as again:
        assert len(completions(again, PROMPTS, GREEDY)) == len(PROMPTS)
