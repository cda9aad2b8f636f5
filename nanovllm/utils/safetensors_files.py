"""The tensors of a folder of safetensors files, on the device where they are wanted."""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.layers.parallel import Cut
from nanovllm.utils.stream import Piece, stream

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def safetensors_weights(
    folder: Path, device: torch.device, cuts: Mapping[str, Cut]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a folder's `model.safetensors`, of the shards in its index, or of its only safetensors file.

    On a CPU they are views of the mapped file, which the system pages in as they are read. To a GPU they are streamed
    through a little pinned memory (see `stream`); a mapped file would go through the driver's, one page at a time.
    Of tensors in `cuts` only that part is read; to a GPU, parts that lie scattered come from the mapped file.

    Raises:
        ValueError: no such file, an index that is broken, leads out of the folder or misses shards, a corrupt file, a
            tensor of another shape than its cut is for.
    """
    files = _safetensors_files(folder)
    if device.type == "cpu":
        for file, names in files:
            yield from _mapped_tensors(file, names, cuts)
        return
    pieces = [piece for file, names in files for piece in stored_tensors(file, names)]
    scattered = {piece.name for piece in pieces if piece.name in cuts and not cuts[piece.name].lies_together}
    yield from stream([_cut_piece(p, cuts.get(p.name)) for p in pieces if p.name not in scattered], device)
    for file in dict.fromkeys(piece.file for piece in pieces if piece.name in scattered):
        for name, tensor in _mapped_tensors(file, None, cuts, scattered):
            yield name, tensor.contiguous().to(device)


def wrong_shape(source: object, name: str, shape: Sequence[int], wanted: Sequence[int]) -> ValueError:
    return ValueError(f"{source}: tensor {name!r} has shape {list(shape)}, the config asks for {list(wanted)}")


def _cut_piece(piece: Piece, cut: Cut | None) -> Piece:
    """Where the part of a tensor lies that `cut` leaves."""
    if cut is None:
        return piece
    if piece.shape != cut.shape:
        raise wrong_shape(piece.file.parent, piece.name, piece.shape, cut.shape)
    ((first, last),) = cut.pieces
    row_bytes = (piece.end - piece.start) // piece.shape[0]
    start, end = piece.start + first * row_bytes, piece.start + last * row_bytes
    return replace(piece, shape=(last - first, *piece.shape[1:]), start=start, end=end)


def _safetensors_files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """Files to read and the tensors to expect in each (None: whatever is there)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(folder, index)
    single = folder / "model.safetensors"
    if single.is_file():
        return [(single, None)]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return [(found[0], None)]
    names = ", ".join(file.name for file in found) or "no safetensors file"
    raise ValueError(f"{folder}: expected model.safetensors or model.safetensors.index.json, found {names}")


def _indexed_files(folder: Path, index: Path) -> list[tuple[Path, set[str] | None]]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            shards.setdefault(shard, set()).add(name)
        if not all(isinstance(shard, str) for shard in shards):
            raise TypeError("a shard is not a string")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{index}: not a valid index of safetensors shards ({error!r})") from error
    for shard in shards:
        if Path(shard).name != shard:
            raise ValueError(f"{index}: shard {shard!r} is not a file name inside the folder")
    missing = [shard for shard in sorted(shards) if not (folder / shard).is_file()]
    if missing:
        raise ValueError(f"{index}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:5])}")
    return [(folder / shard, names) for shard, names in sorted(shards.items())]


def _mapped_tensors(
    file: Path, names: set[str] | None, cuts: Mapping[str, Cut], wanted: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of a file's tensors, or of those `wanted`, cut."""
    with _opened(file, names) as reader:
        for name in reader.keys():  # noqa: SIM118 - a safetensors reader is no mapping
            if wanted is not None and name not in wanted:
                continue
            tensor, cut = reader.get_tensor(name), cuts.get(name)
            if cut is not None and tuple(tensor.shape) != cut.shape:
                raise wrong_shape(file.parent, name, tensor.shape, cut.shape)
            yield name, tensor if cut is None else cut.of(tensor)


def stored_tensors(file: Path, names: set[str] | None) -> list[Piece]:
    """Where each of a file's tensors lies in it, in the file's order.

    Raises:
        ValueError: as `safetensors_weights`, or a dtype that torch does not have.
    """
    with _opened(file, names):  # the library checks the header: lengths, offsets without holes, the file's size
        pass
    with open(file, "rb") as content:
        header_size = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(header_size))
    header.pop("__metadata__", None)
    pieces = (_piece(file, 8 + header_size, name, entry) for name, entry in header.items())
    return sorted(pieces, key=lambda piece: (piece.start, piece.end))


def _piece(file: Path, data_start: int, name: str, entry: dict[str, Any]) -> Piece:
    dtype, (start, end) = DTYPES.get(entry["dtype"]), entry["data_offsets"]
    if dtype is None:
        raise ValueError(f"{file}: tensor {name!r} has dtype {entry['dtype']}, which is not supported")
    if end - start != math.prod(entry["shape"]) * dtype.itemsize:
        raise ValueError(f"{file}: tensor {name!r} of shape {entry['shape']} has {end - start} bytes")
    return Piece(file, name, dtype, tuple(entry["shape"]), data_start + start, data_start + end)


@contextmanager
def _opened(file: Path, names: set[str] | None) -> Iterator[Any]:
    """A safetensors reader of a file that holds `names`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as reader:
            absent = sorted((names or set()) - set(reader.keys()))
            if absent:
                raise ValueError(f"{file}: tensor {absent[0]!r} is in the index but not in the shard")
            yield reader
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a valid safetensors file ({error})") from error
