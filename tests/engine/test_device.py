"""An engine's GPU is the current one wherever kernels are launched: shown without a GPU, by what is asked of torch."""

from contextlib import contextmanager
from threading import Thread

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import build
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.utils import device as devices

SECOND = torch.device("cuda", 1)


class FakeCuda:
    """Stands for `torch.cuda.device`, one thread at a time."""

    def __init__(self):
        self.current = None

    @contextmanager
    def device(self, device):
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    return fake


def seen_by(monkeypatch, cuda, cls, name):
    """What is current whenever the method is called."""
    seen, method = [], getattr(cls, name)

    def look(self, *args, **kwargs):
        seen.append(cuda.current)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(cls, name, look)
    return seen


def test_steps_run_with_the_engines_gpu_current_in_any_thread(monkeypatch, cuda, tiny):
    with LLM(tiny, device="cpu") as llm:
        monkeypatch.setattr(llm.model_runner, "device", SECOND)
        seen = seen_by(monkeypatch, cuda, DecoderForCausalLM, "compute_logits")
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        llm.generate([5, 6], params, use_tqdm=False)
        other = Thread(target=llm.generate, args=([5, 6], params, False))
        other.start()
        other.join()
        assert seen == [SECOND] * 6
        assert cuda.current is None
        monkeypatch.undo()


def test_a_model_is_built_with_its_gpu_current(monkeypatch, cuda, tiny):
    monkeypatch.setattr(build, "made_current", lambda device: devices.made_current(SECOND))
    seen = seen_by(monkeypatch, cuda, DecoderForCausalLM, "__init__")
    with LLM(tiny, device="cpu"):
        pass
    assert seen == [SECOND]
    assert cuda.current is None


def test_a_cpu_has_nothing_to_make_current(cuda):
    with devices.made_current(torch.device("cpu")):
        assert cuda.current is None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_engines_on_two_gpus(tiny):
    """Graphs and all, while the other one's GPU is current."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"dtype": "float32", "num_kvcache_blocks": 40, "max_num_seqs": 8}
    with LLM(tiny, device="cuda:0", **options) as first, LLM(tiny, device="cuda:1", **options) as second:
        outs = [llm.generate([[5, 6], [7] * 30], params, use_tqdm=False) for llm in (first, second, first)]
        assert torch.cuda.current_device() == 0
    ids = [[out["token_ids"] for out in some] for some in outs]
    assert ids[0] == ids[1] == ids[2]
