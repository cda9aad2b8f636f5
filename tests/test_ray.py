"""Two replicas on a real local Ray, one of them killed while it works."""

import json
import os
import signal
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.cli.main import main
from tests.helpers import save_random_model, save_tokenizer, small_config

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from nanovllm.ray import BatchGenerator, LineGenerator, plain  # noqa: E402

GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tokenizer(path)
    save_random_model(path, small_config("qwen3", vocab_size=258, num_hidden_layers=1, max_position_embeddings=256))
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def die_once(folder):
    """SIGKILL this process when it has done a batch, the first time that anybody gets here."""
    (folder / f"pid-{os.getpid()}").touch()
    if len(list(folder.glob("pid-*"))) >= 2:
        try:
            (folder / "killed").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Mortal(BatchGenerator):
    def __init__(self, folder, **options):
        super().__init__(**options)
        self.folder = Path(folder)

    def __call__(self, batch):
        done = super().__call__(batch)
        die_once(self.folder)  # the batch is computed, not yet returned
        return done


def test_batch_generator_survives_the_death_of_a_replica(tmp_path, tiny):
    rows = [{"id": i, "token_ids": [3 + i % 200, 5], "keep": {"x": i}} for i in range(120)]
    rows[7]["token_ids"] = [999]
    dataset = ray.data.from_items(rows, override_num_blocks=12).map_batches(
        Mortal,
        fn_constructor_kwargs={
            "folder": str(tmp_path),
            **{"model": tiny, "device": "cpu", "sampling_params": GREEDY, "token_ids": True},
        },
        batch_format="pyarrow",
        batch_size=10,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    outs = sorted(dataset.take_all(), key=lambda row: row["id"])
    assert (tmp_path / "killed").exists()
    assert len(list(tmp_path.glob("pid-*"))) == 3  # two, and the one that took the dead one's place
    assert [out["id"] for out in outs] == list(range(120))
    assert "outside the vocabulary" in outs[7]["error"]
    assert all(out["error"] is None and out["keep"] == {"x": out["id"]} for out in outs if out["id"] != 7)
    with LLM(tiny, device="cpu") as llm:
        expected = llm.generate([rows[i]["token_ids"] for i in (0, 50)], SamplingParams(**GREEDY), use_tqdm=False)
    assert [list(outs[i]["output_token_ids"]) for i in (0, 50)] == [out["token_ids"] for out in expected]


def test_command_survives_the_death_of_a_replica(tmp_path, tiny, monkeypatch):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    records = [json.dumps({"id": i, "token_ids": [3 + i % 200, 5]}) for i in range(200)]
    records[20] = "{bad"
    source.write_text("\n".join(records))
    arguments = ["generate", str(source), "--model", tiny, "--device", "cpu", "--max-tokens", "4", "--quiet"]
    original = LineGenerator._results
    folder = tmp_path / "marks"
    folder.mkdir()

    def results(self, lines):
        done = original(self, lines)
        die_once(folder)
        return done

    class MortalLines(LineGenerator):
        _results = results

    monkeypatch.setattr("nanovllm.ray.LineGenerator", MortalLines)
    assert main([*arguments, "-o", str(target), "--ray", "--replicas", "2", "--batch-size", "20", "--strict"]) == 1
    assert (folder / "killed").exists()
    alone = tmp_path / "alone.jsonl"
    assert main([*arguments, "-o", str(alone)]) == 0
    assert target.read_bytes() == alone.read_bytes()  # draws included: they follow the line, not the replica


def test_numpy_batches(tiny):
    import numpy as np

    generator = BatchGenerator(tiny, GREEDY, device="cpu")
    messages = np.empty(1, object)
    messages[0] = np.array([{"role": "user", "content": "hi"}], object)
    table = generator({"id": np.array([np.int64(4)]), "messages": messages})
    assert table["id"].to_pylist() == [4]
    assert table["num_output_tokens"].to_pylist() == [4]
    assert plain(np.array([np.array([1, 2])], object)) == [[1, 2]]
