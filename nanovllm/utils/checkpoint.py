"""A checkpoint in either of its forms: a folder as on the Hub, or one GGUF file."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from nanovllm.layers.parallel import Cut
from nanovllm.utils.hub import is_gguf, resolve_model
from nanovllm.utils.safetensors_files import safetensors_weights

MAX_LAYERS = 10_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def check_num_layers(value: Any, source: Path) -> None:
    """Refuse an absurd number of layers before transformers makes lists of that length."""
    if isinstance(value, int) and value > MAX_LAYERS:
        raise ValueError(f"{source}: {value} layers are more than {MAX_LAYERS}")


class Checkpoint(Protocol):
    """What the engine asks of a checkpoint. Reading it executes nothing from it."""

    path: Path

    def config(self) -> Any:
        """The transformers config."""
        ...

    def weights(
        self, device: torch.device | str = "cpu", cuts: Mapping[str, Cut] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor on `device`) of every tensor, one at a time; of those in `cuts` the part."""
        ...

    def tokenizer(self) -> Any:
        """The transformers tokenizer, None when there is none."""
        ...

    def eos_token_ids(self) -> list[int]:
        """Ids that end a completion, the tokenizer's own aside."""
        ...


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Find `model` (folder, `.gguf` file, folder holding one, or Hub id) and open it."""
    path = resolve_model(model)
    if is_gguf(path):
        from nanovllm.utils.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    return FolderCheckpoint(path)


class FolderCheckpoint:
    """config.json, safetensors and tokenizer files in one folder."""

    def __init__(self, path: Path):
        self.path = path

    def config(self) -> Any:
        from transformers import AutoConfig

        raw = self._read_json("config.json")
        if raw is None:
            raise ValueError(f"{self.path}: no config.json in the folder")
        check_num_layers(raw.get("num_hidden_layers"), self.path / "config.json")
        try:
            return AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers validates with many exception types
            raise ValueError(f"{self.path / 'config.json'}: transformers cannot read it: {error}") from error

    def weights(
        self, device: torch.device | str = "cpu", cuts: Mapping[str, Cut] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return safetensors_weights(self.path, torch.device(device), cuts or {})

    def tokenizer(self) -> Any:
        if not any((self.path / name).is_file() for name in TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # as above
            raise ValueError(f"{self.path}: transformers cannot read the tokenizer: {error}") from error

    def eos_token_ids(self) -> list[int]:
        source = self._read_json("generation_config.json") or {}
        ids = source.get("eos_token_id")
        if ids is None:
            ids = getattr(self.config(), "eos_token_id", None)
        if ids is None:
            return []
        listed = ids if isinstance(ids, (list, tuple)) else [ids]
        if not all(isinstance(i, int) and i >= 0 for i in listed):
            raise ValueError(f"{self.path}: eos_token_id must be a token id or a list of them, got {ids!r}")
        return list(listed)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        file = self.path / name
        if not file.is_file():
            return None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # also text that is no UTF-8
            raise ValueError(f"{file}: not valid JSON ({error})") from error
        if not isinstance(content, dict):
            raise ValueError(f"{file}: not a JSON object")
        return content
