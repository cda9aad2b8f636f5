"""Killed at every step of writing, and by SIGKILL from outside: no line lost, none twice, never half a line."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from nanovllm.cli import resume
from nanovllm.cli.main import main
from nanovllm.cli.records import read_lines
from nanovllm.cli.resume import Done, FileOutput, Result, content_hash, open_output, ranges

FINGERPRINT = {"input": "hash", "max-tokens": 4}
NUM_LINES = 9
POINTS = [(resume, "sync"), (os, "replace"), (os, "truncate"), (resume, "convert"), (resume.FileOutput, "_append")]


def result(index, error=False):
    return Result(index, 10, json.dumps({"id": index}).encode() + b"\n", error, 3, 2)


def write_all(path, order, restart=False):
    output = FileOutput(str(path), FINGERPRINT, restart)
    if not output.complete:
        for index in order:
            if index not in output.done:
                output.write(result(index))
                output.commit(now=index % 3 == 0)
        output.finish()
    output.close()
    return output


def read_ids(path):
    return [json.loads(line.content)["id"] for line in read_lines(str(path)) if path.name.endswith((".jsonl", ".gz"))]


def killed_at(count, work):
    """Run `work` in a child that dies at its `count`-th write, sync, rename ...; False when it got to its end."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    left = count

    def dying(function):
        def call(*args):
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(9)
            done = function(*args)
            left -= 1
            if left == 0:
                os._exit(9)
            return done

        return call

    for owner, name in POINTS:
        setattr(owner, name, dying(getattr(owner, name)))
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_killed_before_and_after_every_step(tmp_path, name, shuffled):
    order = list(range(NUM_LINES))
    if shuffled:
        random.Random(3).shuffle(order)
    for count in range(1, 1000):
        path = tmp_path / str(count) / name
        path.parent.mkdir()
        if not killed_at(count, lambda path=path: write_all(path, order)):
            break
        assert not path.exists() or sorted(read_ids(path)) == list(range(NUM_LINES))
        killed_at(7, lambda path=path: write_all(path, order))  # and again, further on
        output = write_all(path, order)
        ids = read_ids(path)
        assert ids == order if not shuffled else sorted(ids) == sorted(order)
        assert vars(output.totals) == {
            **{"lines": NUM_LINES, "errors": 0, "size": 10 * NUM_LINES},
            **{"prompt_tokens": 3 * NUM_LINES, "output_tokens": 2 * NUM_LINES},
        }
        assert {file.name for file in path.parent.iterdir()} == {name, f"{name}.journal"}
    assert 20 < count < 1000


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_torn_ends_are_cut_off(tmp_path, cut):
    """What a kill within a write leaves: half a line of output, half an entry of the journal."""
    path = tmp_path / "out.jsonl"
    output = FileOutput(str(path), FINGERPRINT, False)
    for index in range(6):
        output.write(result(index))
        output.commit()
    output.close()
    journal, partial = tmp_path / "out.jsonl.journal", tmp_path / "out.jsonl.partial"
    journal.write_bytes(journal.read_bytes()[:-cut])
    partial.write_bytes(partial.read_bytes() + b'{"id": 6')
    write_all(path, range(NUM_LINES))
    assert read_ids(path) == list(range(NUM_LINES))


def test_other_inputs_options_and_files_are_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    with pytest.raises(ValueError, match="not of this command"):
        FileOutput(str(path), FINGERPRINT, False)
    assert path.read_text() == "precious\n"
    write_all(path, range(NUM_LINES), restart=True)
    with pytest.raises(ValueError, match="another max-tokens"):
        FileOutput(str(path), {**FINGERPRINT, "max-tokens": 5}, False)
    assert FileOutput(str(path), FINGERPRINT, False).complete
    path.unlink()  # whoever deletes the output wants it again
    assert write_all(path, range(NUM_LINES)).totals.lines == NUM_LINES
    assert read_ids(path) == list(range(NUM_LINES))


def test_a_mistyped_first_command_leaves_nothing_in_the_way(tmp_path):
    path = tmp_path / "out.jsonl"
    FileOutput(str(path), {**FINGERPRINT, "model": "typo"}, False).close()
    write_all(path, range(NUM_LINES))
    assert read_ids(path) == list(range(NUM_LINES))


def test_a_stream_cannot_be_resumed(tmp_path):
    path = tmp_path / "out.jsonl"
    output = FileOutput(str(path), {"input": None}, False)
    output.write(result(0))
    output.close()
    with pytest.raises(ValueError, match="another input"):
        FileOutput(str(path), {"input": None}, False)


def test_two_commands_do_not_write_the_same_output(tmp_path):
    pytest.importorskip("fcntl")
    first = FileOutput(str(tmp_path / "out.jsonl"), FINGERPRINT, False)
    with pytest.raises(ValueError, match="another process"):
        FileOutput(str(tmp_path / "out.jsonl"), FINGERPRINT, True)
    first.close()


def test_devices_and_links_stay_what_they_are(tmp_path):
    assert open_output("/dev/null", None, dict, False).done.low == 0
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.touch()
    link.symlink_to(target)
    write_all(link, range(3), restart=True)
    assert link.is_symlink()
    assert read_ids(target) == [0, 1, 2]


def test_sets_of_line_numbers():
    numbers = [5, 0, 1, 9, 4, 2]
    assert ranges(numbers) == [[0, 3], [4, 6], [9, 10]]
    done = Done()
    for start, end in [[4, 6], [9, 10], [0, 3]]:
        done.add_range(start, end)
    assert [i for i in range(12) if i in done] == sorted(numbers)
    done.add_range(3, 4)
    assert (done.low, done.above) == (6, {9})


def test_a_changed_input_has_another_hash(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("a")
    before = content_hash(str(path))
    path.write_text("b")
    assert content_hash(str(path)) not in (before, None)
    assert content_hash("-") is None


def command(source, target, tiny, *options):
    code = (
        "import sys; from nanovllm.cli import main, resume; resume.COMMIT_SECONDS = 0.02; "
        "sys.exit(main.main(sys.argv[1:]))"
    )
    arguments = ["generate", str(source), "-o", str(target), "--model", tiny, "--device", "cpu", "--max-tokens", "8"]
    return [sys.executable, "-c", code, *arguments, "--ignore-eos", "--quiet", *options]


def kill_and_go_on(arguments, target, rng, kills, longest=1.0):
    """Start the command, SIGKILL it up to `kills` times at random moments of its work, then let it end; the kills."""
    journal, killed = f"{target}.journal", 0
    while killed < kills:
        before = os.path.getsize(journal) if os.path.exists(journal) else 0
        process = subprocess.Popen(arguments)
        while process.poll() is None and (not os.path.exists(journal) or os.path.getsize(journal) == before):
            time.sleep(0.005)  # until it has begun, so that the moments are those that matter
        time.sleep(rng.uniform(0, longest))
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            break
        killed += 1
        if target.exists():  # as a whole or not at all
            for line in (gzip.open if target.suffix == ".gz" else open)(target, "rb"):
                json.loads(line)
    subprocess.run(arguments, check=True)
    return killed


@pytest.mark.parametrize("options", [(), ("--unordered",)])
def test_sigkill_at_random_moments(tmp_path, tiny, options):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "token_ids": [2 + i % 200, 7]}) + "\n" for i in range(1500)))
    arguments = command(source, target, tiny, *options)
    assert kill_and_go_on(arguments, target, random.Random(len(options)), kills=3, longest=0.4)
    ids = read_ids(target)
    assert (sorted(ids) if options else ids) == list(range(1500))
    assert main([*arguments[3:-1], "--max-tokens", "9"] if not options else [*arguments[3:], "--top-k", "2"]) == 2
    if not options:  # the same as without a kill
        whole = tmp_path / "whole.jsonl"
        assert main([*arguments[3:5], "-o", str(whole), *arguments[7:]]) == 0
        assert whole.read_bytes() == target.read_bytes()
