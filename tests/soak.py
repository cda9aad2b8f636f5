"""Random mixed load on small engines for as long as one likes: nothing leaks, drifts or gets lost.

    python -m tests.soak --minutes 60

A catalogue of requests is answered once by an engine with room for all of them. Then engines with random options and
small pools get the same requests in random order and number: one by one, as batches, as streams, from two threads.
Meanwhile requests are aborted, streams left, hostile requests sent, prefix caches reset, and exceptions raised at
random lines of the library. Every answer must be the catalogue's, every request must be answered unless this script
dropped it, and whenever an engine is idle all its blocks and rows must be back. The last line is JSON: the figures.
"""

import argparse
import ctypes
import gc
import json
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from tests.helpers import Interrupter, save_random_model, save_tokenizer, small_config

WINDOW = 96
BLOCKS_OF_A_SEQUENCE = WINDOW // 16
MAX_OUTSTANDING = 24
SECONDS_PER_ENGINE = 10
HOSTILE: list[tuple[Any, dict[str, Any]]] = [
    ("", {}),
    ([300], {}),
    ([1] * WINDOW, {}),
    (None, {}),
    ([1, "2"], {}),
    ([5], {"stop_token_ids": [999]}),
    ([5], {"max_tokens": 0}),
    ([5], {"temperature": float("nan")}),
]

Case = tuple[list[int], SamplingParams]


class Fault(BaseException):
    """What the script raises inside the library: no `Exception`, which it would take for a tokenizer's."""


def catalogue(rng: random.Random, count: int) -> list[Case]:
    """Requests that end on their own and whose answers depend on nothing but themselves."""
    shared = [[rng.randrange(2, 258) for _ in range(48)] for _ in range(4)]
    return [(_prompt(rng, shared), _params(rng)) for _ in range(count)]


def _prompt(rng: random.Random, shared: list[list[int]]) -> list[int]:
    own = [rng.randrange(2, 258) for _ in range(rng.randint(1, 20))]
    return rng.choice(shared)[: rng.choice([16, 17, 32, 47, 48])] + own if rng.random() < 0.6 else own


def _params(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {
        "temperature": rng.choice([0, 0, 0.7, 1.5]),
        "max_tokens": rng.choice([None, 1, 2, 8, 20]),
        "ignore_eos": rng.random() < 0.5,
        "seed": rng.randrange(2**31),
    }
    if rng.random() < 0.5:
        extras = {"top_k": 5, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.4}
        extras |= {
            "n": 3,
            "logprobs": 2,
            "prompt_logprobs": 1,
            "stop": ["a", "bc"],
            "stop_token_ids": [77],
            "logit_bias": {1: 4.0},
        }
        extras |= {"min_tokens": 1}
        name = rng.choice(list(extras))
        options[name] = extras[name]
    return SamplingParams(**options)


def answer(out: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What must not depend on circumstances."""
    fields = ("token_ids", "text", "finish_reason", "stop_reason")
    return [tuple(completion[field] for field in fields) for completion in out.get("completions", [out])]


def rss_mib() -> float:
    """What the process holds; what its allocator keeps of freed memory (some ten MiB) has been given back."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]


class Soak:
    """Load for engines on one checkpoint.

    Args:
        folder: where the checkpoint is made.
        seed: of all random choices but the timing of threads.
        cases: size of the catalogue.
    """

    def __init__(self, folder: Path, seed: int, cases: int = 150):
        self.rng = random.Random(seed)
        self.folder = folder
        save_tokenizer(folder)
        config = small_config(
            "llama", vocab_size=258, num_hidden_layers=1, hidden_size=32, max_position_embeddings=WINDOW
        )
        save_random_model(folder, config)
        self.cases = catalogue(self.rng, cases)
        with LLM(folder, device="cpu") as llm:
            outs = llm.generate([ids for ids, _ in self.cases], [params for _, params in self.cases], use_tqdm=False)
        self.expected = [answer(out) for out in outs]
        self.figures: Counter[str] = Counter()

    def run_engine(self, may_go_on: Callable[[], bool]) -> None:
        """Build an engine, load it as long as `may_go_on()` and drain it."""
        rng = self.rng
        max_num_seqs = rng.choice([2, 5, 8])
        options = {
            "overlap": rng.random() < 0.5,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": rng.choice([max_num_seqs, 16, 40, 200]),
            "num_kvcache_blocks": rng.choice([BLOCKS_OF_A_SEQUENCE, 9, 14, 40]),
            "enable_prefix_caching": rng.random() < 0.8,
        }
        with LLM(self.folder, device="cpu", **options) as llm:
            load = EngineLoad(self, llm)
            while may_go_on():
                load.tick()
            load.drain()
            for name in ("steps", "preemptions", "prefix_hit_tokens", "generated_tokens"):
                self.figures[name] += int(llm.stats()[name])
        self.figures["engines"] += 1

    def num_lost(self) -> int:
        """Requests that neither came back nor were dropped on purpose."""
        return self.figures["requests"] - sum(self.figures[n] for n in ("answered", "aborted", "streams left early"))


class EngineLoad:
    """The load of one engine; `outstanding` requests were added and are still to be reported."""

    def __init__(self, soak: Soak, llm: LLM):
        self.soak, self.llm, self.rng, self.figures = soak, llm, soak.rng, soak.figures
        self.outstanding: dict[int, int] = {}  # request id -> case

    def tick(self) -> None:
        """One random action and some steps."""
        actions = [self.add, self.abort, self.generate, self.stream, self.hostile, self.fault, self.reset, self.drain]
        weights = [60, 6, 4, 4, 4, 6, 1, 1]
        self.rng.choices([*actions, self.threads], [*weights, 1])[0]()
        for _ in range(self.rng.randint(0, 4)):
            self.step()
        if self.rng.random() < 0.05:
            self.check_accounting()

    def case(self) -> int:
        return self.rng.randrange(len(self.soak.cases))

    def require(self, case: int, out: dict[str, Any]) -> None:
        assert answer(out) == self.soak.expected[case], (self.soak.cases[case], out, self.soak.expected[case])
        self.figures["answered"] += 1

    def add(self) -> None:
        if len(self.outstanding) < MAX_OUTSTANDING:
            case = self.case()
            self.outstanding[self.llm.add_request(*self.soak.cases[case])] = case
            self.figures["requests"] += 1

    def step(self) -> None:
        for seq_id, out in self.llm.step_outputs():
            self.require(self.outstanding.pop(seq_id), out)

    def abort(self) -> None:
        if self.outstanding:
            seq_id = self.rng.choice(list(self.outstanding))
            if self.llm.abort(seq_id):  # False: finished, to be reported by the next step
                del self.outstanding[seq_id]
                self.figures["aborted"] += 1

    def generate(self) -> None:
        cases = [self.case() for _ in range(self.rng.randint(1, 5))]
        prompts, params = zip(*(self.soak.cases[case] for case in cases), strict=True)
        self.figures["requests"] += len(cases)
        outs = self.llm.generate(prompts, params, use_tqdm=False)
        for case, out in zip(cases, outs, strict=True):
            self.require(case, out)

    def stream(self) -> None:
        cases = [self.case() for _ in range(self.rng.randint(1, 3))]
        prompts, params = zip(*(self.soak.cases[case] for case in cases), strict=True)
        self.figures["requests"] += len(cases)
        leave_after = self.rng.choice([1, 5, 10**9])
        got: dict[tuple[int, int], tuple[Any, ...]] = {}
        for new in self.llm.stream(prompts, params):
            ids, text, *_ = got.get((new.index, new.completion), ([], ""))
            got[new.index, new.completion] = (ids + new.token_ids, text + new.text, new.finish_reason, new.stop_reason)
            leave_after -= 1
            if not leave_after:
                break
        for (index, completion), have in got.items():
            want = self.soak.expected[cases[index]][completion]
            assert have == want if have[2] else want[0][: len(have[0])] == have[0], (have, want)
        left = sum(not all(got.get((i, k), ([], "", None))[2] for k in range(params[i].n)) for i in range(len(cases)))
        self.figures["streams left early"] += left
        self.figures["answered"] += len(cases) - left

    def hostile(self) -> None:
        prompt, options = self.rng.choice(HOSTILE)
        try:
            self.llm.add_request(prompt, SamplingParams(**options))
        except (TypeError, ValueError):
            self.figures["refused"] += 1
        else:
            raise AssertionError(f"{prompt!r} with {options} was not refused")

    def fault(self) -> None:
        """An exception at a random line of a step: the step is lost, its requests are not."""
        interrupter = Interrupter(self.rng.randint(1, 400), self.rng.choice([Fault, KeyboardInterrupt]))
        try:
            outs = interrupter.run(self.llm.step_outputs)
        except (Fault, KeyboardInterrupt):
            self.figures["faults"] += 1
        else:
            for seq_id, out in outs:
                self.require(self.outstanding.pop(seq_id), out)

    def reset(self) -> None:
        self.llm.reset_prefix_cache()

    def threads(self) -> None:
        """Another thread generates while this one steps."""
        failures: list[BaseException] = []

        def generate() -> None:
            try:
                self.generate()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=generate)
        thread.start()
        while thread.is_alive():
            self.step()
        thread.join()
        assert not failures, failures

    def drain(self) -> None:
        """Until the engine is idle: then nobody waits for an answer, and everything is back in its place."""
        while not self.llm.is_finished():
            self.step()
        assert not self.outstanding, f"requests lost: {self.outstanding}"
        assert not self.llm._requests
        stats = self.llm.stats()
        assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)
        assert sorted(self.llm.scheduler._free_rows) == list(range(self.llm.scheduler.max_num_seqs))
        self.check_accounting()
        self.figures["idle checks"] += 1

    def check_accounting(self) -> None:
        self.llm.stats()  # any use of the engine clears away what broke off before
        sequences = [seq for request in set(self.llm._requests.values()) for seq in request.sequences]
        self.llm.scheduler.block_manager.check_integrity(sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description="random mixed load on small engines")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    end = began + 60 * args.minutes
    report_at = warm_at = began + 0.1 * (end - began)
    warm = 0.0
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), args.seed)
        while (now := time.monotonic()) < end:
            until = min(end, now + SECONDS_PER_ENGINE)
            soak.run_engine(lambda: time.monotonic() < until)  # noqa: B023 - called before `until` changes
            if now >= report_at:
                warm = warm or rss_mib()
                print(f"{(now - began) / 60:.1f} min, RSS {rss_mib():.0f} MiB, {dict(soak.figures)}", flush=True)
                report_at += 0.1 * (end - began)
    growth = rss_mib() - warm
    figures = {**soak.figures, "minutes": args.minutes, "rss_mib_warm": round(warm), "rss_mib_growth": round(growth, 1)}
    print(json.dumps({**figures, "lost": soak.num_lost()}))
    assert soak.num_lost() == 0, f"{soak.num_lost()} requests were lost"
    assert growth < 0.1 * warm, f"{growth:.0f} MiB more than after {(warm_at - began) / 60:.0f} minutes"


if __name__ == "__main__":
    main()
