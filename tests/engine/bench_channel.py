"""Time that a step takes from rank 0 to the other ranks: python tests/engine/bench_channel.py [--ranks N] [--seqs N]

`here`: what rank 0 spends on it before it launches its own share. `there`: from the beginning of that until the slowest
other rank has the step in its hands, asleep before. Microseconds; the last line is one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time

import numpy as np

from nanovllm.engine.channel import ChannelClosed, Receiver, Sender
from nanovllm.engine.step import ON_DEVICE, ROW_PARAMS, StepInput
from nanovllm.engine.step_message import StepDecoder, StepEncoder

STEP_S = 2e-3  # between two steps: the worker sleeps then, as it does while a GPU runs


def decode_step(num_seqs: int, position: int) -> StepInput:
    """Every 16th sequence has got a new block, as with blocks of 16 tokens; with larger ones it is fewer."""
    changed = np.arange(position % 16, num_seqs, 16, dtype=np.int32)
    return StepInput(
        rows=np.arange(num_seqs, dtype=np.int32),
        starts=np.full(num_seqs, position, dtype=np.int32),
        lengths=np.ones(num_seqs, dtype=np.int32),
        token_ids=np.full(num_seqs, ON_DEVICE, dtype=np.int32),
        samples=np.ones(num_seqs, dtype=np.int32),
        table_changes=np.stack([changed, changed, changed]),
        row_params=np.zeros((ROW_PARAMS, 0), dtype=np.int32),
    )


def read_steps(name, reader, doorbell, num_readers, answers):
    receiver, decoder = Receiver(name, reader, doorbell, num_readers), StepDecoder()
    answers.send(0)
    try:
        while True:
            decoder.decode(receiver.receive()[1])
            answers.send(time.perf_counter())  # the same clock in all processes
    except ChannelClosed:
        receiver.close()


def measure(num_ranks: int, num_seqs: int, repeats: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    bells = [context.Pipe(duplex=False) for _ in range(num_ranks - 1)]
    answers = [context.Pipe(duplex=False) for _ in range(num_ranks - 1)]
    sender, encoder = Sender([write for _, write in bells]), StepEncoder()
    for reader, ((bell, _), (_, answer)) in enumerate(zip(bells, answers, strict=True)):
        args = (sender.name, reader, bell, num_ranks - 1, answer)
        context.Process(target=read_steps, args=args, daemon=True).start()
        bell.close()
    for answer, _ in answers:
        answer.recv()
    here, there = [], []
    for position in range(repeats):
        step = decode_step(num_seqs, position)
        time.sleep(STEP_S)
        began = time.perf_counter()
        sender.send(1, encoder.encode(step), lambda: None)
        here.append(time.perf_counter() - began)
        there.append(max(answer.recv() for answer, _ in answers) - began)
    sender.close()
    for process in multiprocessing.active_children():
        process.join()
    return {
        "ranks": num_ranks,
        "sequences": num_seqs,
        "here_us": round(statistics.median(here) * 1e6, 1),
        "here_p90_us": round(statistics.quantiles(here, n=10)[-1] * 1e6, 1),
        "there_us": round(statistics.median(there) * 1e6, 1),
        "there_p90_us": round(statistics.quantiles(there, n=10)[-1] * 1e6, 1),
        "cores": os.cpu_count() or 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1000)
    args = parser.parse_args()
    print(json.dumps(measure(args.ranks, args.seqs, args.repeats)))


if __name__ == "__main__":
    main()
