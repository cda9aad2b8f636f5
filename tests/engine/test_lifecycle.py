"""Engines come and go: what they hold, what they leave behind, and who may use them."""

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.helpers import save_random_model, save_tokenizer, small_config

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[n, n + 1] for n in range(2, 10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    save_random_model(path, small_config("qwen3", vocab_size=258, num_hidden_layers=1), seed=3)
    return path


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, device="cpu", max_num_seqs=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(llm):
    return [tokens(llm, prompt) for prompt in PROMPTS]


def tokens(llm, prompt):
    return llm.generate([prompt], GREEDY, use_tqdm=False)[0]["token_ids"]


def run_script(script, *args):
    """Run Python code in a process of its own; its output, by lines."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_starts_nothing_and_touches_no_gpu():
    """No thread, no process, no CUDA context, and none of the packages that only some engines need."""
    script = """
        import sys, threading, os
        before = set(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else set()
        import torch
        with_torch = set(os.listdir("/proc/self/task")) if before else set()
        import nanovllm
        after = set(os.listdir("/proc/self/task")) if before else set()
        print(torch.cuda.is_initialized(), threading.active_count(), len(after - with_torch))
        heavy = ("triton", "transformers", "gguf", "huggingface_hub", "pyarrow", "flash_attn", "multiprocessing.pool")
        print(*[name for name in heavy if name in sys.modules])
        print(nanovllm.__all__)
    """
    assert run_script(script) == ["False 1 0", "", "['LLM', 'SamplingParams']"]


def test_building_and_closing_again_and_again_takes_no_more_host_memory(folder):
    """In a process of its own, where nothing else allocates."""
    script = """
        import gc, re, sys
        from nanovllm import LLM, SamplingParams
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

        def round_trip():
            with LLM(sys.argv[1], device="cpu", num_kvcache_blocks=2000) as llm:
                llm.generate(["abc", [5] * 40], params, use_tqdm=False)

        def rss():
            gc.collect()
            return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

        for _ in range(2):
            round_trip()
        before = rss()
        for _ in range(10):
            round_trip()
        print(rss() - before)
    """
    pool_kib = 2000 * 16 * 2 * 2 * 16 * 4 // 1024
    assert int(run_script(script, folder)[0]) < pool_kib / 4  # of ten pools, not a part of one stays


@pytest.mark.gpu
def test_building_and_closing_again_and_again_takes_no_more_gpu_memory(folder):
    def round_trip():
        with LLM(folder, dtype="float32", num_kvcache_blocks=200, max_num_seqs=16) as llm:
            return tokens(llm, PROMPTS[0])

    first = round_trip()  # brings the libraries' own memory
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(10):
        assert round_trip() == first
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 2**25


def test_engine_that_nobody_closed_goes_with_its_last_reference(folder):
    engine = LLM(folder, device="cpu")
    tokens(engine, PROMPTS[0])
    runner = weakref.ref(engine.model_runner)
    del engine
    gc.collect()
    assert runner() is None


def test_closed_engine_says_so(folder):
    engine = LLM(folder, device="cpu")
    stream = engine.stream("a")
    next(stream)
    engine.close()
    engine.close()
    calls = [lambda: engine.generate("a"), lambda: engine.add_request("a"), lambda: engine.chat([{}])]
    calls += [engine.step, engine.step_outputs, engine.is_finished, engine.stats, engine.reset_prefix_cache]
    calls += [lambda: engine.abort(0), lambda: list(engine.stream("a")), lambda: list(stream), engine.__enter__]
    for call in calls:
        with pytest.raises(RuntimeError, match="this LLM has been closed"):
            call()


def test_two_engines_in_one_process_take_turns(folder, llm, expected):
    """Step by step, each with its own requests, pool and statistics."""
    with LLM(folder, device="cpu", overlap=True, num_kvcache_blocks=4) as other:
        keys = [engine.add_request(prompt, GREEDY) for engine in (llm, other) for prompt in PROMPTS[:3]]
        outs = {id(llm): {}, id(other): {}}
        while not (llm.is_finished() and other.is_finished()):
            for engine in (llm, other):
                outs[id(engine)].update(engine.step()[0])
        assert [outs[id(llm)][key] for key in keys[:3]] == expected[:3]
        assert [outs[id(other)][key] for key in keys[3:]] == expected[:3]
    assert tokens(llm, PROMPTS[0]) == expected[0]


def test_two_processes_at_the_same_time(folder, expected):
    script = """
        import sys
        from nanovllm import LLM, SamplingParams
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        with LLM(sys.argv[1], device="cpu") as llm:
            for i in range(5):
                print([out["token_ids"] for out in llm.generate([[n, n + 1] for n in range(2, 10)], params)])
    """
    with ThreadPoolExecutor(2) as pool:
        for lines in pool.map(lambda _: run_script(script, folder), range(2)):
            assert lines == [str(expected)] * 5


def test_threads_generate_at_the_same_time(llm, expected):
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: tokens(llm, prompt), PROMPTS)) == expected
    assert llm.is_finished()
    llm.scheduler.block_manager.check_integrity([])


def test_step_reports_nothing_of_what_another_thread_generates(llm, expected):
    """`step` belongs to `add_request`: a call of `generate` keeps its own, whoever's step finishes it."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: [tokens(llm, prompt) for prompt in PROMPTS * 3])
        mine = []
        while not other.done():
            key = llm.add_request(PROMPTS[0], GREEDY)
            while True:
                outs = llm.step()[0]
                if outs:
                    break
            assert outs == [(key, expected[0])]
            mine += outs
        assert other.result() == expected * 3
    assert mine
    assert llm.is_finished()


def test_thread_that_steps_for_nothing_keeps_no_other_from_its_turn(llm, expected):
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(lambda: [tokens(llm, prompt) for prompt in PROMPTS]) for _ in range(2)]
        num_steps = 0
        while not all(other.done() for other in others):
            assert llm.step()[0] == []
            num_steps += 1
            assert num_steps < 20_000
        assert [other.result() for other in others] == [expected] * 2


def test_use_from_within_a_call_is_refused(llm, expected, monkeypatch):
    """As a signal handler would: what it interrupts is half done."""
    launch, refusals = llm.model_runner.launch, []

    def interrupted(inputs):
        for call in (llm.step, llm.close, lambda: tokens(llm, PROMPTS[1])):
            with pytest.raises(RuntimeError, match="in the middle of a call"):
                call()
            refusals.append(call)
        return launch(inputs)

    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner, "launch", interrupted)
        assert tokens(llm, PROMPTS[0]) == expected[0]
    assert len(refusals) == 3 * 12
    assert tokens(llm, PROMPTS[1]) == expected[1]


def test_stream_that_the_collector_finds_in_the_middle_of_a_step_is_dropped_by_the_next(llm, expected, monkeypatch):
    streams = [llm.stream(PROMPTS[1], GREEDY)]
    next(streams[0])
    schedule = llm.scheduler.schedule

    def dropping():
        batch = schedule()
        streams.clear()  # closes it
        return batch

    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, "schedule", dropping)
        assert tokens(llm, PROMPTS[0]) == expected[0]
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)
    assert not llm._requests


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*")
def test_use_in_a_forked_child_is_refused_and_harms_nothing(llm, expected):
    stream = llm.stream(PROMPTS[1], GREEDY)
    first = next(stream).token_ids
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # no pytest in here
        answers = []
        for call in (lambda: llm.generate(PROMPTS[0]), llm.step, lambda: next(stream), llm.close, stream.close):
            try:
                answers.append(str(call()))
            except BaseException as error:
                answers.append(f"{type(error).__name__}: {error}")
        os.write(write, "\n".join(answers).encode())
        os._exit(0)
    os.waitpid(child, 0)
    refusal = (
        f"RuntimeError: this LLM belongs to process {os.getpid()} and cannot be used in a process forked from it "
        f"({child}): make an LLM there, or start the process with multiprocessing's 'spawn' method"
    )
    assert os.read(read, 10_000).decode().splitlines() == [refusal] * 3 + ["None", "None"]
    assert first + [token for new in stream for token in new.token_ids] == expected[1]
    assert tokens(llm, PROMPTS[0]) == expected[0]
