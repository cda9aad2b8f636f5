"""Streaming tensors out of safetensors files: what comes out, what is refused, and how much memory it takes."""

import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanovllm.layers.parallel import Cut
from nanovllm.utils.checkpoint import FolderCheckpoint
from nanovllm.utils.safetensors_files import safetensors_weights, stored_tensors
from nanovllm.utils.stream import spans, stream
from tests.helpers import save_random_model, small_config

CPU = torch.device("cpu")


def streamed(pieces, **sizes):
    return {name: tensor.clone() for name, tensor in stream(pieces, CPU, **sizes)}


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def save(path, sizes=((30, 7), (1,), (0, 4), (100, 33), ()), seed=0):
    """Tensors of several dtypes and shapes, one larger than a slab, one empty, one a scalar."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool)
    tensors = {}
    for i, dtype in enumerate(dtypes):
        for j, size in enumerate(sizes):
            tensors[f"{path.stem}.{i}.{j}"] = torch.randint(0, 2, size, generator=generator).to(dtype)
    save_file(tensors, path)
    return tensors


@pytest.mark.parametrize("num_slabs", [1, 3])
@pytest.mark.parametrize(("slab_bytes", "span_bytes"), [(64, 256), (1000, 10), (10**6, 10**6)])
def test_tensors_come_out_as_they_were_saved(tmp_path, num_slabs, slab_bytes, span_bytes):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    expected = save(files[0]) | save(files[1], seed=1)
    pieces = [piece for file in files for piece in stored_tensors(file, None)]
    found = streamed(pieces, num_slabs=num_slabs, slab_bytes=slab_bytes, span_bytes=span_bytes)
    assert_same(found, expected)


def write_raw(file, entries, data):
    header = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_a_tensor_at_an_odd_address(tmp_path):
    file = tmp_path / "odd.safetensors"
    values = torch.tensor([1.5, -2.25])
    entries = {
        "one": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "two": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    write_raw(file, entries, b"\x07" + values.numpy().tobytes())
    assert_same(streamed(stored_tensors(file, None)), {"one": torch.tensor([7], dtype=torch.uint8), "two": values})


def test_spans_hold_neighbours_up_to_a_size(tmp_path):
    file = tmp_path / "a.safetensors"
    save_file({f"{i}": torch.zeros(10) for i in range(5)} | {"big": torch.zeros(100)}, file)
    groups = list(spans(stored_tensors(file, None), 100))
    assert [len(span.pieces) for span in groups] == [2, 2, 1, 1] or [len(s.pieces) for s in groups] == [1, 2, 2, 1]
    assert all(span.end - span.start <= 100 or len(span.pieces) == 1 for span in groups)


def test_the_two_ways_of_reading_a_checkpoint_agree(tmp_path):
    save_random_model(tmp_path, small_config("qwen3"), max_shard_size="60KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    expected = dict(FolderCheckpoint(tmp_path).weights())
    assert_same(streamed([piece for file in files for piece in stored_tensors(file, None)]), expected)


def test_files_that_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    save(file)
    whole = file.read_bytes()
    with pytest.raises(ValueError, match="tensor 'gone' is in the index but not in the shard"):
        stored_tensors(file, {"gone"})
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a valid safetensors file"):
        stored_tensors(file, None)
    file.write_bytes(struct.pack("<Q", 2**62) + whole[8:])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a valid safetensors file"):
        stored_tensors(file, None)
    entry = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]}
    write_raw(file, {"vast": entry}, bytes(8))
    with pytest.raises(ValueError, match=r"model\.safetensors: not a valid safetensors file"):
        stored_tensors(file, None)
    with pytest.raises(ValueError, match=r"absent\.safetensors: not a valid safetensors file"):
        stored_tensors(tmp_path / "absent.safetensors", None)


def test_a_file_that_shrinks_or_goes_while_it_is_read(tmp_path):
    file = tmp_path / "model.safetensors"
    save(file)
    pieces = stored_tensors(file, None)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size - 50])
    with pytest.raises(ValueError, match=rf"model\.safetensors: ends after {size - 50} bytes, where {size} or more"):
        streamed(pieces)
    file.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read"):
        streamed(pieces)


def test_a_reader_that_stops_early_leaves_nothing_running(tmp_path):
    save(tmp_path / "a.safetensors")
    tensors = stream(stored_tensors(tmp_path / "a.safetensors", None), CPU, slab_bytes=64, span_bytes=64)
    next(tensors)
    tensors.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nanovllm-read")]


MEASURE = """
import sys
from pathlib import Path
import torch
from nanovllm.layers.parallel import Cut
from nanovllm.utils.checkpoint import FolderCheckpoint
from nanovllm.utils.safetensors_files import safetensors_weights, stored_tensors
from nanovllm.utils.stream import stream

def peak(read):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    def now(name):
        return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024
    before = now("VmRSS")
    for name, tensor in read():
        target.copy_(tensor)
    return now("VmHWM") - before

folder, cpu = Path(sys.argv[1]), torch.device("cpu")
target = torch.zeros(2**20, dtype=torch.bfloat16)
files = sorted(folder.glob("*.safetensors"))
pieces = [piece for file in files for piece in stored_tensors(file, None)]
print(peak(FolderCheckpoint(folder).weights))
print(peak(lambda: stream(pieces, cpu, slab_bytes=2**20, span_bytes=2**22)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' /proc")
def test_peak_host_memory_is_under_two_shards(tmp_path):
    """Six shards of 24 MiB, mapped as for a CPU, and streamed in eight slabs of 1 MiB and spans of 4 MiB."""
    weight_map = {}
    for shard in range(6):
        tensors = {f"{shard}.{i}": torch.full((2**20,), i, dtype=torch.bfloat16) for i in range(12)}
        save_file(tensors, tmp_path / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{shard}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # else glibc's heap keeps spans that were given back
    run = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True, env=env)
    mapped, streaming = map(int, run.stdout.split())
    shard_bytes = 24 * 2**20
    assert mapped < 2 * shard_bytes
    assert streaming < shard_bytes


@pytest.mark.gpu
def test_streaming_to_a_gpu(tmp_path):
    expected = save(tmp_path / "a.safetensors", sizes=((1000, 1000), (3,), (2000, 500)))
    pieces = stored_tensors(tmp_path / "a.safetensors", None)
    for sizes in ({}, {"num_slabs": 2, "slab_bytes": 10**5, "span_bytes": 10**6}):
        found = dict(stream(pieces, torch.device("cuda"), **sizes))
        assert all(tensor.is_cuda for tensor in found.values())
        assert_same({name: tensor.cpu() for name, tensor in found.items()}, expected)


def test_parts_of_tensors_are_all_that_is_read(tmp_path, monkeypatch):
    """Rows are streamed, columns come from the mapped file; rows that nobody asks for are not read."""
    tensors = {"rows": torch.randn(8, 6), "columns": torch.randn(4, 10), "whole": torch.randn(5)}
    tensors["both"] = torch.randn(12, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    cuts = {
        "rows": Cut((8, 6), 0, ((2, 4),)),
        "columns": Cut((4, 10), 1, ((5, 10),)),
        "both": Cut((12, 3), 0, ((0, 2), (6, 8))),
    }
    read = []

    def listing(pieces, device):
        read.extend(pieces)
        return stream(pieces, CPU)

    monkeypatch.setattr("nanovllm.utils.safetensors_files.stream", listing)
    for device in (CPU, torch.device("meta")):  # what is no CPU is streamed to
        found = dict(safetensors_weights(tmp_path, device, cuts))
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            expected = cuts[name].of(tensor) if name in cuts else tensor
            assert found[name].shape == expected.shape
            assert found[name].is_meta or torch.equal(found[name], expected)
    assert sorted((piece.name, piece.end - piece.start) for piece in read) == [("rows", 2 * 6 * 4), ("whole", 20)]
