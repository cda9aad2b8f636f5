"""Where a step's time goes: host time by stage with its distribution, GPU time by kernel, gaps. Run as a script.

    python tests/engine/profile_steps.py --shape qwen3-0.6b --num-requests 256
    python tests/engine/profile_steps.py --prefill

Host times are of the four stages of a step, waits for the GPU excluded. GPU times come from torch's profiler over some
steps in the middle of the run; the busy share is the time in which some kernel runs.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm import SamplingParams, bench


class Stopwatch:
    """Seconds of each call of some methods, by name."""

    def __init__(self):
        self.times = defaultdict(list)

    def watch(self, owner, name):
        method = getattr(owner, name)

        def timed(*args):
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.times[name].append(time.perf_counter() - start)

        setattr(owner, name, timed)


def describe(times):
    us = sorted(t * 1e6 for t in times)
    at = lambda share: us[min(int(share * len(us)), len(us) - 1)]  # noqa: E731
    return f"median {at(0.5):6.0f}  90 % {at(0.9):6.0f}  99 % {at(0.99):6.0f}  max {us[-1]:6.0f} us"


def host_times(llm, steps):
    watch = Stopwatch()
    for owner, name in (
        (llm.scheduler, "schedule"),
        (llm._step_builder, "build"),
        (llm.model_runner, "launch"),
        (llm.scheduler, "postprocess"),
    ):
        watch.watch(owner, name)
    start = time.perf_counter()
    for _ in range(steps):
        llm.step()
    wall = time.perf_counter() - start
    for name, times in watch.times.items():
        print(f"host {name:12} {describe(times)}")
    total = [sum(stages) for stages in zip(*watch.times.values(), strict=True)]
    print(f"host a step       {describe(total)}; a step takes {wall / steps * 1e6:.0f} us")


def gpu_times(llm, steps, rows):
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            if not llm.is_finished():
                llm.step()
        torch.cuda.synchronize()
    events = sorted(
        ((e.time_range.start, e.time_range.end, e.name) for e in profiler.events() if e.device_type.name == "CUDA"),
    )
    busy, until = 0.0, events[0][0]
    by_name = defaultdict(lambda: [0, 0.0])
    for start, end, name in events:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        by_name[name][0] += 1
        by_name[name][1] += end - start
    span = until - events[0][0]
    print(f"gpu: {span / steps:.0f} us a step, busy {busy / span:.1%}, idle between kernels {1 - busy / span:.1%}")
    for name, (count, total) in sorted(by_name.items(), key=lambda item: -item[1][1])[:rows]:
        print(f"  {total / steps:8.1f} us a step  {count / steps:6.1f} launches  {name[:90]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=bench.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=12, help="kernels listed")
    parser.add_argument("--prefill", action="store_true", help="the steps of 128 prompts of 1024 tokens, 16 at a time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        options = bench.parse_args(["--shape", args.shape, "--num-requests", str(args.num_requests)])
        llm, _, _ = bench.build_llm(options, Path(scratch))
        if args.prefill:
            options = bench.parse_args(["--workload", "prefill"])
            for repeat in range(2):  # the first one warms up
                for request in bench.uniform_workload(options, repeat):
                    llm.add_request(request.prompt, SamplingParams(temperature=0.6, max_tokens=1))
                gpu_times(llm, 9, args.rows)  # 8 steps of work, and one that takes in the last tokens
            return
        for request in bench.mixed_workload(options, 0):
            llm.add_request(request.prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1024))
        for _ in range(30):  # through the prompts
            llm.step()
        host_times(llm, args.steps)
        gpu_times(llm, 20, args.rows)
        llm.close()


if __name__ == "__main__":
    main()
