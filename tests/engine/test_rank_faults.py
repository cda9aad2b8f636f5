"""What goes wrong around ranks: the caller hears of it soon and with the cause, and nothing stays behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import tensor_parallel
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.worker import STEP
from tests.helpers import save_random_model, save_tokenizer, small_config

OPTIONS = {"device": "cpu", "num_kvcache_blocks": 40, "max_num_seqs": 4}
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
SOON_S = 10  # in which a fault has to reach the caller


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    save_random_model(path, small_config("qwen3", vocab_size=258, num_hidden_layers=1), seed=3)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, **OPTIONS) as llm:
        return tokens(llm)


@pytest.fixture(scope="module")
def shared(folder):
    """For tests after which it has to be as usable as before."""
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_stays_behind(shared):
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) == before
    assert leftovers() == []


def leftovers(pid=None):
    """Shared memory and folders of a process's engines."""
    pid, memory = pid or os.getpid(), Path("/dev/shm")
    names = [*memory.glob(f"nvllm-{pid:x}-*")] if memory.is_dir() else []
    return [*names, *Path(tempfile.gettempdir()).glob(f"nanovllm-{pid}-*")]


def tokens(llm):
    return llm.generate([[5, 6, 7]], SHORT, use_tqdm=False)[0]["token_ids"]


def pids(llm):
    return [process.pid for process in llm.model_runner._workers.processes]


def later(action, seconds=0.2):
    """Run `action` in a thread; the list that is returned gets the time when it ran."""
    times = []

    def run():
        time.sleep(seconds)
        times.append(time.monotonic())
        action()

    threading.Thread(target=run, daemon=True).start()
    return times


def again_and_again(action):
    """Until something is raised, but not for ever."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        action()


def check_lost(llm, cause):
    """Every use says why; closing is no error."""
    llm.add_request([1, 2], SHORT)
    for use in (lambda: tokens(llm), llm.step):
        with pytest.raises(RuntimeError, match="this LLM has lost its workers and cannot go on") as refusal:
            use()
        assert cause in str(refusal.value)
    with pytest.raises(ValueError, match="process object is closed"):  # as only one that ended can be
        pids(llm)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM has been closed"):
        tokens(llm)


@pytest.mark.parametrize("size", [2, 4])
def test_worker_that_raises_in_a_step(folder, monkeypatch, size):
    """The others wait in the middle of the step for what it should have added."""
    llm = LLM(folder, tensor_parallel_size=size, **OPTIONS)
    encoder = llm.model_runner._encoder
    encode = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda step: encode(replace(step, rows=step.rows + 1000)))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"tensor-parallel rank \d failed:\n") as raised:
        tokens(llm)
    assert time.monotonic() - began < SOON_S
    assert "in launch" in str(raised.value), "its traceback"
    assert "IndexError: index 100" in str(raised.value)
    check_lost(llm, "IndexError: index 100")


def test_worker_that_cannot_read_a_step(folder):
    llm = LLM(folder, tensor_parallel_size=2, **OPTIONS)
    llm.model_runner._workers.send(STEP, [b"no step at all, but long enough.."])
    with pytest.raises(RuntimeError, match=r"tensor-parallel rank 1 failed:\n(.*\n)*.*in decode"):
        tokens(llm)
    check_lost(llm, "in decode")


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (4, 3), (4, 1)])
def test_worker_that_is_killed_in_a_step(folder, size, victim):
    llm = LLM(folder, tensor_parallel_size=size, **OPTIONS)
    pid = pids(llm)[victim - 1]
    killed = later(lambda: os.kill(pid, signal.SIGKILL))
    cause = f"rank {victim} (process {pid}) was killed by SIGKILL"
    with pytest.raises(RuntimeError) as raised:
        llm.generate([[5, 6, 7]] * 4, LONG, use_tqdm=False)
    assert time.monotonic() - killed[0] < SOON_S
    assert cause in str(raised.value)
    check_lost(llm, cause)


def test_worker_that_is_killed_while_nothing_runs(folder):
    llm = LLM(folder, tensor_parallel_size=2, **OPTIONS)
    os.kill(pids(llm)[0], signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
        tokens(llm)
    check_lost(llm, "was killed by SIGKILL")


@pytest.mark.parametrize("seconds", [0.05, 1.5])
def test_worker_that_is_killed_while_it_starts(folder, seconds, monkeypatch):
    load, others = ModelRunner.__init__, set(multiprocessing.active_children())

    def slow(*args):
        time.sleep(3)
        load(*args)

    monkeypatch.setattr(ModelRunner, "__init__", slow)  # of this process only: the others are through by then

    def kill():
        while not (children := set(multiprocessing.active_children()) - others):
            time.sleep(0.01)
        os.kill(children.pop().pid, signal.SIGKILL)

    killed = later(kill, seconds)
    with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
        LLM(folder, tensor_parallel_size=4 if seconds > 1 else 2, **OPTIONS, load_format="dummy")
    assert time.monotonic() - killed[0] < SOON_S


def test_fault_of_rank_0_in_a_step_ends_the_engine(folder, monkeypatch):
    """The others are in the middle of the step."""
    llm = LLM(folder, tensor_parallel_size=2, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner._drawer, "draw", lambda *args: 1 / 0)
        began = time.monotonic()
        with pytest.raises(ZeroDivisionError):
            tokens(llm)
        assert time.monotonic() - began < SOON_S
    check_lost(llm, "a step broke off with ZeroDivisionError")


def test_fault_between_steps_ends_nothing(shared, expected, monkeypatch):
    for owner, name in (
        (shared.scheduler, "schedule"),
        (shared.scheduler, "postprocess"),
        (shared._step_builder, "build"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                tokens(shared)
        assert tokens(shared) == expected


def test_interrupt_from_the_keyboard_leaves_the_engine_usable(shared, expected):
    """In whatever line it comes; a terminal sends it to the workers too."""

    def interrupt():
        for pid in (*pids(shared), os.getpid()):
            os.kill(pid, signal.SIGINT)

    for _ in range(5):
        later(interrupt)
        with pytest.raises(KeyboardInterrupt):
            again_and_again(lambda: shared.generate([[5, 6, 7]] * 4, LONG, use_tqdm=False))
        assert tokens(shared) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_does_not_wait():
    passed = []

    def press(times):
        with tensor_parallel.interrupts_put_off():
            for i in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                passed.append((times, i))

    for times in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            press(times)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert passed == [(1, 0), (3, 0)]


@pytest.mark.parametrize("seconds", [0.02, 0.5, 1.5])
def test_interrupt_from_the_keyboard_while_it_starts(folder, seconds):
    later(lambda: os.kill(os.getpid(), signal.SIGINT), seconds)
    with pytest.raises(KeyboardInterrupt):
        again_and_again(lambda: LLM(folder, tensor_parallel_size=2, **OPTIONS).close())


def test_two_engines_at_once(folder, shared, expected):
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as other:
        keys = [llm.add_request([5, 6, 7], SHORT) for llm in (shared, other)]
        found = {}
        while not (shared.is_finished() and other.is_finished()):
            for llm, key in zip((shared, other), keys, strict=True):
                found.update({(id(llm), key): ids for _, ids in llm.step()[0]})
        assert list(found.values()) == [expected] * 2
    assert tokens(shared) == expected


def test_what_does_not_fit_is_refused_before_anything_starts(folder, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: 1 / 0)
    with pytest.raises(ValueError, match="tensor_parallel_size 3 cannot split the model's num_attention_heads 4"):
        LLM(folder, tensor_parallel_size=3, **OPTIONS)


def test_what_only_the_weights_show_is_refused_as_with_one_rank(tmp_path):
    save_random_model(tmp_path, small_config("qwen3"))
    small_config("qwen3", intermediate_size=96).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has shape \[64, 80\], the config asks for \[64, 96\]"):
        LLM(tmp_path, tensor_parallel_size=2, **OPTIONS)


def test_refusal_of_a_worker_names_its_rank(folder, monkeypatch):
    """Something that is there for rank 0 only: here, the checkpoint."""
    monkeypatch.setattr(tensor_parallel, "replace", lambda config, model: replace(config, model=model + "-gone"))
    with pytest.raises(ValueError, match=r"tensor-parallel rank 1 cannot start: .*-gone"):
        LLM(folder, tensor_parallel_size=2, **OPTIONS)


def test_engine_that_nobody_closed_goes_with_its_last_reference(folder):
    llm = LLM(folder, tensor_parallel_size=2, **OPTIONS)
    tokens(llm)
    (pid,) = pids(llm)
    del llm
    assert not alive(pid)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc").is_dir() else True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*")
def test_forked_child_harms_nothing(shared, expected):
    child = os.fork()
    if child == 0:
        shared.close()
        shared.model_runner._workers.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert tokens(shared) == expected


# ---- programs --------------------------------------------------------------------------------------------------

PROGRAM = """
    import sys, time
    from nanovllm import LLM, SamplingParams

    def main():
        llm = LLM(sys.argv[1], device="cpu", num_kvcache_blocks=60, tensor_parallel_size=3 if "3" in sys.argv else 2)
        print(*[process.pid for process in llm.model_runner._workers.processes], flush=True)
        while "forever" in sys.argv:
            llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)
        print(llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]["token_ids"])
        if "raise" in sys.argv:
            raise ValueError("of the program")
"""


def start(tmp_path, folder, *words, guard=True):
    program = tmp_path / "program.py"
    ending = '\nif __name__ == "__main__":\n    main()\n' if guard else "\nmain()\n"
    program.write_text(textwrap.dedent(PROGRAM) + ending)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, program, folder, *words], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_until_gone(numbers):
    deadline = time.monotonic() + SOON_S
    while any(map(alive, numbers)):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)


@pytest.mark.parametrize("seconds", [0.0, 0.3])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent(tmp_path, folder, number, seconds):
    program = start(tmp_path, folder, "forever")
    workers = [int(pid) for pid in program.stdout.readline().split()]
    assert len(workers) == 1
    assert all(map(alive, workers))
    time.sleep(seconds)
    os.kill(program.pid, number)
    assert program.wait(SOON_S) == -number
    wait_until_gone(workers)
    assert leftovers(program.pid) == []
    program.communicate()


@pytest.mark.parametrize("seconds", [1.5, 2.5, 3.5])
def test_parent_that_is_killed_while_it_starts_leaves_nothing(tmp_path, folder, seconds):
    program = start(tmp_path, folder, "forever", "3")
    time.sleep(seconds)
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
    workers = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    os.kill(program.pid, signal.SIGKILL)
    program.communicate()
    wait_until_gone(workers)
    deadline = time.monotonic() + SOON_S
    while leftovers(program.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("words", [[], ["raise"]])
def test_program_that_does_not_close_ends_all_the_same(tmp_path, folder, expected, words):
    program = start(tmp_path, folder, *words)
    out, err = program.communicate(timeout=60)
    assert program.returncode == len(words), err
    workers, completion = out.splitlines()
    assert completion == str(expected)
    assert not any(alive(int(pid)) for pid in workers.split())
    assert "Error in atexit" not in err
    assert "leaked" not in err


def test_program_without_a_guard_is_told_what_to_write(tmp_path, folder):
    out, err = start(tmp_path, folder, guard=False).communicate(timeout=60)
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert "WorkerError: tensor-parallel rank 1" in last
    assert 'up to its `if __name__ == "__main__":`; what makes the LLM has to stand under such a line' in last
    assert "RuntimeError: a process that LLM(..., tensor_parallel_size=N) starts runs the program's main script" in err


def test_torch_is_not_left_with_a_default_group(shared, expected):
    """Of which a process has one, which is the caller's own."""
    assert tokens(shared) == expected
    assert not torch.distributed.is_initialized()
