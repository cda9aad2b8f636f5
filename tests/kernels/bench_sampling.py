"""Time filters, draw and penalties on a GPU, beside sorting the logits with torch.

    python -m tests.kernels.bench_sampling [tune]

Rows of 151,936 bfloat16 logits, normal with the spread given; times are of CUDA-graph replays, over copies that the L2
cache cannot hold. With `tune` the bounds' tiles and warps are varied as well.
"""

import sys

import torch

from nanovllm.kernels.filters import filter_bounds
from nanovllm.kernels.penalties import penalise
from nanovllm.kernels.sampling import filtered_sample, gumbel_sample
from nanovllm.layers.sampler import IN_PROMPT, Filters
from tests.kernels.bench_elementwise import VOCAB, copies, copy_rate, graph_time

ROWS = (1, 8, 32, 128, 256)
SPREADS = (0.3, 2.0)  # nearly flat, as of random weights; peaked, as of trained ones
CASES = {  # temperature, top_k, top_p, min_p
    "no filter": (0.6, 0, 1.0, 0.0),
    "top_k 50": (0.6, 50, 1.0, 0.0),
    "top_p 0.95": (0.6, 0, 0.95, 0.0),
    "both": (0.6, 50, 0.95, 0.0),
    "top_k 20000": (0.6, 20_000, 1.0, 0.0),
    "min_p 0.05": (0.6, 0, 1.0, 0.05),
}
TILES = [(tile, depth, warps) for tile in (4096, 8192, 16384) for depth in (8,) for warps in (8, 16, 32)]


def rows_of(case, rows):
    real = [torch.full((rows,), value, device="cuda") for value in (case[0], case[2], case[3])]
    return Filters(real[0], torch.full((rows,), case[1], dtype=torch.int32, device="cuda"), *real[1:])


def time_rows(rows, spread, dtype, copy):
    size = rows * VOCAB * dtype.itemsize
    logits = [torch.randn(rows, VOCAB, device="cuda").mul_(spread).to(dtype) for _ in range(copies(size))]
    seeds = torch.arange(rows, device="cuda")
    plain = rows_of(CASES["no filter"], rows)
    draw = graph_time([lambda x=x: gumbel_sample(x, plain.temperatures, seeds, seeds) for x in logits])
    sort = graph_time([lambda x=x: x.sort(dim=-1, descending=True) for x in logits[:2]])
    name = str(dtype).removeprefix("torch.")
    print(
        f"{rows} rows, {name}, spread {spread}: reading once {size / copy * 1e6:.1f} us, plain draw {draw:.1f} us, "
        f"torch.sort {sort:.0f} us"
    )
    for label, case in CASES.items():
        f = rows_of(case, rows)
        arguments = (f.temperatures, f.top_ks, f.top_ps, f.min_ps)
        bounds = graph_time([lambda x=x, a=arguments: filter_bounds(x, *a) for x in logits])
        both = graph_time([lambda x=x, f=f: filtered_sample(x, f, seeds, seeds) for x in logits])
        line = f"    {label:12} bounds {bounds:7.1f} us, with draw {both:7.1f} us"
        if "tune" in sys.argv[1:]:
            for tile, depth, warps in TILES:
                options = {"tile": tile, "depth": depth, "num_warps": warps}
                t = graph_time([lambda x=x, a=arguments, o=options: filter_bounds(x, *a, **o) for x in logits])
                line += f"  {tile},{depth},{warps} {t:.1f}"
        print(line, flush=True)


def time_penalties(rows, copy):
    logits = [torch.randn(rows, VOCAB, device="cuda").bfloat16() for _ in range(copies(2 * rows * VOCAB))]
    occurrences = torch.zeros(rows, VOCAB, dtype=torch.int32, device="cuda")
    occurrences[:, ::300] = IN_PROMPT + 1
    penalties = torch.tensor([[1.1], [0.5], [0.5]], device="cuda").repeat(1, rows)
    order = torch.arange(rows, device="cuda")
    t = graph_time([lambda x=x: penalise(x, order, occurrences, penalties) for x in logits])
    print(f"{rows} rows: penalties {t:.1f} us, at the copy rate {10 * rows * VOCAB / copy * 1e6:.1f} us", flush=True)


def main():
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}; copy rate {copy / 1e12:.2f} TB/s")
    for rows in ROWS:
        for spread in SPREADS:
            time_rows(rows, spread, torch.bfloat16, copy)
    time_rows(256, 2.0, torch.float32, copy)
    for rows in (8, 256):
        time_penalties(rows, copy)


if __name__ == "__main__":
    main()
