"""Finding a checkpoint by path or Hub id, with the Hub played by local stand-ins."""

import logging
from pathlib import Path

import huggingface_hub
import pytest

from nanovllm.utils import hub
from nanovllm.utils.hub import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """What `snapshot_download` was called with; the calls still go through."""
    calls, real = [], huggingface_hub.snapshot_download

    def record(repo_id, **options):
        calls.append({"repo_id": repo_id, **options})
        return real(repo_id, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    return calls


@pytest.fixture
def no_network(monkeypatch, calls) -> list[dict]:
    def fail(self, repo_id, *, timeout, **_):
        assert timeout == hub.HUB_TIMEOUT_S
        raise ConnectionError("Name or service not known\nmore about it")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    return calls


def cached_copy(cache: Path, *names: str) -> Path:
    repo = cache / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return touch(repo / "snapshots" / COMMIT, *names)


def test_a_gguf_file_beside_a_config_without_weights_is_the_model(tmp_path):
    folder = touch(tmp_path / "model", "config.json", "a.GGUF")
    assert resolve_model(folder) == folder / "a.GGUF"


@pytest.mark.parametrize("names", [["config.json"], ["config.json", "m.safetensors", "a.gguf"], []])
def test_a_folder_is_taken_as_it_is(tmp_path, names):
    folder = touch(tmp_path / "model", *names)
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder


def test_gguf_files(tmp_path):
    folder = touch(tmp_path / "model", "a.gguf", "readme.md")
    assert resolve_model(folder) == folder / "a.gguf"
    assert resolve_model(folder / "a.gguf") == folder / "a.gguf"
    touch(folder, "b.gguf")
    with pytest.raises(ValueError, match=r"several GGUF files.*: a\.gguf, b\.gguf"):
        resolve_model(folder)


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    touch(tmp_path / "model", "config.json")
    assert resolve_model("~/model") == tmp_path / "model"


def test_a_relative_folder_goes_before_the_hub(tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "org" / "name", "config.json")
    assert resolve_model("org/name") == Path("org/name")
    assert no_network == []


@pytest.mark.parametrize(
    "name", ["/no/such", "./org", "../org/name", "gpt2", "a/b/c", "org/m.gguf", "~/m", "~no/m", "", "org/"]
)
def test_what_is_not_there_and_no_hub_id(name, no_network):
    with pytest.raises(ValueError, match="no such file or folder"):
        resolve_model(name)
    assert no_network == []


def test_a_path_object_is_never_a_hub_id(no_network):
    with pytest.raises(ValueError, match="model 'org/name': no such file or folder"):
        resolve_model(Path("org/name"))


def test_another_file(tmp_path):
    touch(tmp_path, "model.safetensors")
    with pytest.raises(ValueError, match=r"no \.gguf file; pass the folder"):
        resolve_model(tmp_path / "model.safetensors")


def test_no_network_and_no_copy(cache, no_network):
    with pytest.raises(OSError, match="'org/name'") as raised:
        resolve_model("org/name")
    message = str(raised.value)
    for part in ("ConnectionError: Name or service not known)", "HF_TOKEN", "HF_HUB_OFFLINE", "pass their folder"):
        assert part in message
    assert "more about it" not in message
    assert [call["local_files_only"] for call in no_network] == [True]


def test_no_network_but_a_copy(cache, no_network, caplog):
    copy = cached_copy(cache, "config.json", "model.safetensors")
    with caplog.at_level(logging.WARNING, "nanovllm"):
        assert resolve_model("org/name") == copy
    assert "using the cached copy of org/name" in caplog.text


@pytest.mark.parametrize("names", [["config.json"], ["model.safetensors"], []])
def test_half_a_copy_is_none(cache, no_network, names):
    cached_copy(cache, *names)
    with pytest.raises(OSError, match="no copy in the local Hub cache"):
        resolve_model("org/name")


def test_offline_mode_uses_the_copy_without_a_warning(cache, monkeypatch, caplog):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    copy = cached_copy(cache, "config.json", "model.safetensors")
    with caplog.at_level(logging.WARNING, "nanovllm"):
        assert resolve_model("org/name") == copy
    assert caplog.text == ""
    with pytest.raises(OSError, match="OfflineModeIsEnabled"):
        resolve_model("org/other")


def fake_hub(monkeypatch, folder: Path) -> list[dict]:
    calls = []

    def download(repo_id, **options):
        calls.append(options)
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo_id, **_: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_only_files_that_execute_nothing_are_fetched(tmp_path, monkeypatch):
    calls = fake_hub(monkeypatch, touch(tmp_path / "copy", "config.json", "model.safetensors"))
    assert resolve_model("org/name") == tmp_path / "copy"
    (options,) = calls
    assert options["local_files_only"] is False
    repo = ["config.json", "model-1.safetensors", "model.safetensors.index.json", "chat_template.jinja", "merges.txt"]
    repo += ["tokenizer.model", "pytorch_model.bin", "model.pt", "modeling_x.py", "onnx/config.json", "m.gguf", "x.pkl"]
    repo += ["consolidated.safetensors"]
    wanted = huggingface_hub.utils.filter_repo_objects(
        repo, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(wanted) == repo[:6]


def test_a_repository_without_safetensors(tmp_path, monkeypatch):
    fake_hub(monkeypatch, touch(tmp_path / "copy", "config.json"))
    with pytest.raises(OSError, match="no safetensors files"):
        resolve_model("org/name")


def test_an_unknown_repository(cache, monkeypatch, calls):
    def unknown(self, repo_id, **_):
        raise LookupError("404 Repository Not Found")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unknown)
    with pytest.raises(OSError, match=r"404 Repository Not Found\)\. Check the name"):
        resolve_model("org/name")
