"""Which GPU a thread works on, where that is not for the tensors to say."""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread, on which Triton launches kernels and new streams and events lie.

    Each thread has one of its own, at first GPU 0, and an engine may be used from any.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs of a GPU are captured. torch's own choice is one stream of the whole process, on its first GPU.

    One for all engines, as torch's is: for every stream that cuBLAS has seen, it keeps a workspace.
    """
    return torch.cuda.Stream(device)
