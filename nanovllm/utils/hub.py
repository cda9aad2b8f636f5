"""From what a user calls a model to files on this machine."""

import logging
import os
import re
from pathlib import Path

logger = logging.getLogger("nanovllm")

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
# Sub-folders hold the same model for other runtimes, `consolidated` the same weights under other names.
HUB_IGNORED_FILES = ["*/*", "consolidated*"]
HUB_TIMEOUT_S = 10


def resolve_model(model: str | os.PathLike[str]) -> Path:
    """Find a checkpoint, fetching it when it is a Hub id that is not in the local cache.

    Args:
        model: a folder, a `.gguf` file, a folder holding just one of those, or a Hub id such as "org/name".

    Returns:
        The folder or the `.gguf` file.

    Raises:
        ValueError: nothing of that name on this machine although it looks like a path, or no single model there.
        OSError: a Hub id that cannot be fetched and is not in the local cache.
    """
    name = os.fspath(model)
    path = Path(os.path.expanduser(name))
    if name and path.is_dir():  # an empty name would be the current folder
        return _model_in_folder(path)
    if path.is_file():
        if not is_gguf(path):
            raise ValueError(f"model {name!r} is a file, but no .gguf file; pass the folder that holds the checkpoint")
        return path
    if isinstance(model, str) and HUB_ID.fullmatch(name) and not is_gguf(path):
        return _fetch(name)
    raise ValueError(f"model {name!r}: no such file or folder, and it is not a Hub id of the form org/name")


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _model_in_folder(folder: Path) -> Path:
    files = sorted(file for file in folder.iterdir() if is_gguf(file) and file.is_file())
    whole = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    if not files or whole:
        return folder
    if len(files) > 1:
        found = ", ".join(file.name for file in files)
        raise ValueError(f"model {str(folder)!r} holds several GGUF files, pass the path of one: {found}")
    return files[0]


def _fetch(hub_id: str) -> Path:
    """Folder of the Hub's files in the local cache, brought up to date when the Hub answers."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        # Asked first, because the download itself may wait for a silent server without limit.
        HfApi().model_info(hub_id, timeout=HUB_TIMEOUT_S)
        folder = _snapshot(hub_id, local_files_only=False)
    except Exception as error:  # one of many types, by version of huggingface_hub and by its HTTP client
        cached = _cached(hub_id)
        if cached is None:
            raise OSError(_explain(hub_id, error)) from error
        level = logging.INFO if isinstance(error, OfflineModeIsEnabled) else logging.WARNING
        logger.log(level, "using the cached copy of %s, the Hub was not asked: %s", hub_id, _first_line(error))
        return cached
    if not any(folder.glob("*.safetensors")):
        raise OSError(f"model {hub_id!r} on the Hub has no safetensors files; for GGUF, download one and pass its path")
    return folder


def _snapshot(hub_id: str, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        hub_id,
        allow_patterns=HUB_FILES,
        ignore_patterns=HUB_IGNORED_FILES,
        etag_timeout=HUB_TIMEOUT_S,
        local_files_only=local_files_only,
    )
    return Path(folder)


def _cached(hub_id: str) -> Path | None:
    """The local copy. One without config or weights is what an interrupted download left, and no copy."""
    try:
        folder = _snapshot(hub_id, local_files_only=True)
    except Exception:  # as above; the caller reports why the Hub could not be asked
        return None
    complete = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return folder if complete else None


def _explain(hub_id: str, error: Exception) -> str:
    return (
        f"model {hub_id!r}: there is no such folder here, no copy in the local Hub cache, and fetching it from the "
        f"Hub failed ({_first_line(error)}). Check the name and the network; a private or gated model needs "
        f"HF_TOKEN, and HF_HUB_OFFLINE must not be set to 1. Or download the files elsewhere and pass their folder."
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
