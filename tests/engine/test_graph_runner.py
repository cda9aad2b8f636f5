"""Steps as graphs run them, decodes and prompts together, replayed eagerly where there are no graphs."""

from itertools import product

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import Limits
from nanovllm.engine.graph_inputs import MAX_PROMPTS, GraphInputs, fill
from nanovllm.engine.graph_runner import GraphKey, GraphRunner, graph_keys
from nanovllm.engine.pacing import Pacer
from nanovllm.engine.step import ROW_PARAMS, StepInput
from nanovllm.layers.embed_head import LMHead
from tests.helpers import random_prompt, save_random_model, save_tokenizer, small_config

PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=1, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.3, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=2, max_tokens=5, ignore_eos=True, bad_words=["!"]),
    SamplingParams(temperature=1, n=3, logit_bias={7: 3.0}, max_tokens=8, ignore_eos=True),
]


class Replayed(GraphRunner):
    """Goes through what a graph would hold each time, and counts."""

    num_prompt_tokens = 0

    def _replay(self, key):
        self._run(key, self._runner.ops.decode_inputs)

    def inputs_for(self, inputs):
        self.num_prompt_tokens += int((inputs.token_ids >= 0).sum())
        return super().inputs_for(inputs)


class Backend:
    """What `graph_keys` looks at."""

    def __init__(self, shared, graph_prompts):
        self.shared, self.graph_prompts = shared, graph_prompts


@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(1, 1), (1, 300), (5, 5), (5, 7), (256, 300), (512, 16384)])
@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("shared", [None, object()])
def test_sizes_go_up_to_all_sequences_and_to_the_prompt_tokens_beside_them(max_num_seqs, tokens, prompts, shared):
    keys = graph_keys(Limits(max_num_seqs, tokens, 100), Backend(shared, prompts))
    assert keys == sorted(set(keys))
    largest = {kind: [key[:2] for key in keys if key[2:] == kind][-1:] for kind in product([False, True], repeat=2)}
    all_draw = [(max_num_seqs, max_num_seqs)]
    assert largest[False, False] == all_draw
    assert largest[True, False] == (all_draw if shared and max_num_seqs > 1 else [])
    mixed = [(min(max_num_seqs + 256, tokens), max_num_seqs)] if prompts and tokens > 1 else []
    assert largest[False, True] == mixed
    assert largest[True, True] == (mixed if shared and max_num_seqs > 1 else [])
    for key in keys:  # however many sequences draw in a step, a graph of its size has room for them
        assert key._replace(draws=min(key.tokens, max_num_seqs)) in keys


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_random_model(folder, small_config("qwen3", vocab_size=258, head_dim=16, num_hidden_layers=1))

    save_tokenizer(folder)
    return folder


def answers(folder, graphs, chunk):
    """(outputs, the graphs, batches that share) of prompts of several lengths with several parameters."""
    common = random_prompt(64, 3)
    prompts = [random_prompt(n, n) for n in (1, 5, 16, 17, 33)] + [[*common, 9], [*common, 8, 7], common]
    prompts = [[token % 250 for token in prompt] for prompt in prompts]
    params = [PARAMS[i % len(PARAMS)] for i in range(len(prompts))]
    options = {"dtype": "float32", "device": "cpu", "attention_backend": "triton", "kvcache_block_size": 16}
    with LLM(folder, max_num_seqs=12, max_num_batched_tokens=chunk, num_kvcache_blocks=80, **options) as llm:
        finder = llm._step_builder._shared_prefixes
        finder._min_run_saving, finder._min_saved = 1, 1
        limits = Limits(12, chunk, llm._inputs.max_model_len)
        if graphs:
            runner = llm.model_runner
            with torch.inference_mode():
                runner.graphs = Replayed(runner, graph_keys(limits, runner.attention))
            llm.scheduler._pacer = Pacer(limits.max_graph_tokens, MAX_PROMPTS, False)
        outs = llm.generate(prompts, params, use_tqdm=False)
        keep = ("token_ids", "completions", "logprobs")
        return [{name: out.get(name) for name in keep} for out in outs], llm.model_runner.graphs, finder.num_found


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Layers with a window of 20 tokens and layers without."""
    folder = tmp_path_factory.mktemp("windowed")
    kinds = ["sliding_attention", "full_attention"]
    config = small_config(
        "gemma3", vocab_size=258, head_dim=16, num_hidden_layers=2, layer_types=kinds, sliding_window=20
    )
    save_random_model(folder, config)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize(("kind", "chunk"), [("model", 12), ("model", 512), ("windowed", 512)])
def test_graphs_with_prompt_tokens_give_what_eager_steps_give(kind, chunk, monkeypatch, request):
    model = request.getfixturevalue(kind)
    # A CPU's weights are packed, and nothing writes through them into a given buffer.
    monkeypatch.setattr(LMHead, "write_logits", lambda head, hidden, out: out.copy_(head(hidden)))
    expected, _, _ = answers(model, False, chunk)
    outs, graphs, num_shared = answers(model, True, chunk)
    assert outs == expected
    assert graphs.num_prompt_tokens > 40
    assert num_shared > 0


def step(*chunks, draws=None):
    """A step of (start, tokens) of several sequences; draws: for each, whether a next token is drawn."""
    starts, lengths = np.array(chunks, dtype=np.int32).T
    return StepInput(
        rows=np.arange(len(chunks), dtype=np.int32),
        starts=starts,
        lengths=lengths,
        token_ids=np.ones(lengths.sum(), np.int32),
        samples=np.array(draws or [1] * len(chunks), np.int32),
        table_changes=np.zeros((3, 0), np.int32),
        row_params=np.zeros((ROW_PARAMS, 0), np.int32),
    )


def test_steps_run_in_the_smallest_graph_that_has_room(model):
    with LLM(
        model, dtype="float32", device="cpu", attention_backend="triton", max_num_seqs=4, num_kvcache_blocks=8
    ) as llm:
        keys = [
            GraphKey(2, 2, False, False),
            GraphKey(4, 4, False, False),
            GraphKey(8, 2, False, True),
            GraphKey(8, 4, False, True),
            GraphKey(200, 80, False, True),
        ]
        with torch.inference_mode():
            graphs = Replayed(llm.model_runner, keys)
        decode = (30, 1)
        assert graphs._key(step(decode)) == keys[0]
        assert graphs._key(step(decode, decode, decode)) == keys[1]
        assert graphs._key(step(decode, (0, 7))) == keys[2]
        assert graphs._key(step(decode, decode, (0, 6))) == keys[3]
        assert graphs._key(step((0, 7), (5, 1), (0, 100))) == keys[4]
        # A token from which nothing is drawn, as of a prompt that came in but for its last token
        assert graphs._key(step(decode, decode, draws=[1, 0])) == keys[2]
        assert graphs.fits(step(decode, decode, decode, decode))
        assert not graphs.fits(step(*[decode] * 5))
        assert graphs.fits(step(decode, (0, 199)))
        assert not graphs.fits(step(decode, (0, 200)))
        assert graphs.fits(step(decode, *[(0, 3)] * 64))
        assert not graphs.fits(step(decode, *[(0, 3)] * 65))


def test_nothing_of_a_step_is_left_in_the_next_ones_inputs():
    """What a graph reads of inputs that are filled again and again is what it reads of fresh ones."""
    rng = np.random.default_rng(0)
    used = GraphInputs.padding(80, 9)
    for _ in range(200):
        decodes, prompts = rng.integers(0, 5), rng.integers(0, 4)
        chunks = [(int(rng.integers(1, 50)), 1) for _ in range(decodes)]
        chunks += [(int(rng.integers(0, 50)), int(rng.integers(2, 20))) for _ in range(prompts)]
        if not chunks:
            continue
        draws = rng.integers(0, 2, len(chunks)).tolist() if rng.integers(2) else None
        inputs, fresh = step(*chunks, draws=draws), GraphInputs.padding(80, 9)
        fill(used, inputs, 9)
        fill(fresh, inputs, 9)
        names = ["rows", "context_lens", "given"]
        if not inputs.draws_everywhere:
            names += ["drawn_from", "drawn_for", "decode_lens", "prompt_lens", "prompt_starts"]
            in_use = used.prompt_lens > 0
            np.testing.assert_array_equal(used.prompt_rows[in_use], fresh.prompt_rows[in_use])
        for name in names:
            np.testing.assert_array_equal(getattr(used, name), getattr(fresh, name), err_msg=name)
