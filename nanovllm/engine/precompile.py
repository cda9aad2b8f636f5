"""Kernels are compiled side by side before the first of them runs: one by one, as launches ask for them, takes longer.

Which variants a model needs depends on its shapes and on the sizes of steps. So steps are gone through without running
a kernel: each launch only leaves a note of what it would have to compile.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from nanovllm.config import Limits
from nanovllm.engine.few_layers import few_layers
from nanovllm.engine.graph_runner import GraphRunner, graph_keys
from nanovllm.engine.memory import run_largest_step
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.kernels import reference

logger = logging.getLogger("nanovllm")

# Batch sizes between which the kernels' choices of tiles change. A variant that they miss is compiled when it is met.
DECODE_SIZES = (1, 2, 4, 8, 32, 128, 256)
SHARED_SIZES = (4, 32, 256)
MAX_THREADS = 16

NOTING = threading.Lock()  # what is exchanged in Triton meanwhile is the whole process's


@torch.inference_mode()
def compile_kernels(runner: ModelRunner, limits: Limits, use_graphs: bool) -> None:
    """Compile the Triton kernels of prefill and decode steps, or load them from Triton's cache on disk."""
    import triton

    start = time.perf_counter()
    with few_layers(runner.model):
        noted = _without_running(lambda: _go_through_steps(runner, limits, use_graphs))
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(runner.device,)) as pool:
        with triton.AsyncCompileMode(pool):
            kernels = [kernel.preload(specialization) for kernel, specialization in noted]
        # `run` is made when it is read: what launches the kernel, for which Triton may call the C compiler.
        list(pool.map(lambda kernel: kernel.result().run, kernels))
    logger.info("%d kernels compiled or loaded in %.1f s", len(noted), time.perf_counter() - start)


def _go_through_steps(runner: ModelRunner, limits: Limits, use_graphs: bool) -> None:
    run_largest_step(runner, limits)
    if use_graphs:
        keys = graph_keys(limits, runner.attention)
        sizes = {False: (*DECODE_SIZES, limits.max_num_seqs), True: (*SHARED_SIZES, limits.max_num_seqs)}
        graphs = GraphRunner(runner, [key for key in keys if key.prompts or key.tokens in sizes[key.shared]])
        graphs.go_through(lambda *args: (runner.ops.decode_inputs(*args), reference.decode_inputs(*args))[1])
    runner.rows.last_tokens.zero_()  # what no kernel wrote was "drawn"; it would be looked up in the embedding


def _without_running(launches: Callable[[], None]) -> list[tuple[Any, str]]:
    """(kernel, specialisation) of each that `launches` would have to compile; this thread's launches do nothing.

    All of them: one that is compiled already must not run on what another one that is not would have written.
    """
    from triton import JITFunction, knobs

    noted: dict[str, tuple[Any, str]] = {}
    thread = threading.get_ident()

    def run(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run_before(kernel, *args, warmup=warmup or threading.get_ident() == thread, **kwargs)

    def note(*, key: str, fn: Any, compile: dict[str, Any], **more: Any) -> bool | None:
        if threading.get_ident() != thread:  # another engine's
            return hook_before(key=key, fn=fn, compile=compile, **more) if hook_before is not None else None
        noted[f"{fn.name} {key}"] = (fn.jit_function, compile["specialization_data"])
        return True

    with NOTING:
        run_before, hook_before = JITFunction.run, knobs.runtime.jit_cache_hook
        JITFunction.run, knobs.runtime.jit_cache_hook = run, note
        try:
            launches()
        finally:
            JITFunction.run, knobs.runtime.jit_cache_hook = run_before, hook_before
    return list(noted.values())
