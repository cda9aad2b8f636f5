"""Time attention over a float8 cache beside a bfloat16 one on a GPU, for many tile configurations. Run as a script.

Decode, the pass over a shared prefix and prefill, each in microseconds a layer, the built-in configuration first and
then the fastest ones; "copy" is the share of the measured copy rate at which keys and values are read.
"""

import argparse
import itertools

import torch

from nanovllm.kernels import decode_attention, prefill_attention
from nanovllm.kernels.decode_attention import paged_decode
from nanovllm.kernels.decode_plan import DecodePlan
from nanovllm.kernels.norm_rope_store import norm_rope_store
from nanovllm.kernels.prefill_attention import paged_prefill
from nanovllm.kernels.reference import FP8
from tests.kernels.bench_attention import (
    BLOCK_SIZE,
    DECODES,
    HEAD_DIM,
    PREFILLS,
    SCALE,
    copy_rate,
    graph_time,
    int32,
    make_inputs,
    make_q,
)

DECODE_CONFIGS = list(itertools.product((32, 64), (1, 2, 4), (2, 3, 4, 6)))  # keys, warps, stages
PREFILL_CONFIGS = list(itertools.product((64, 128), (64, 128), (4, 8), (2, 3)))  # rows, keys, warps, stages


def caches_of(context_lens, num_kv_heads, fp8):
    """(caches, tables, scales); as many bytes of either kind, so that neither stays in the L2 cache."""
    caches, tables = make_inputs(context_lens, num_kv_heads)
    if not fp8:
        return caches, tables, None
    scales = torch.full((2, num_kv_heads), 0.5, device="cuda")
    caches = torch.cat([caches.to(FP8).view(torch.uint8)] * 2).view(FP8)
    return caches, tables, scales


def timed(configs, make_calls):
    """[(microseconds, configuration)], the built-in one (None) first, then ascending; without those that do not fit."""
    times = []
    for config in [None, *configs]:
        try:
            times.append((graph_time(make_calls(config)), config))
        except Exception as error:  # shared memory, registers, or what the compiler makes of it
            if config is None:
                raise
            print(f"    {config}: {type(error).__name__}", flush=True)
    return times[:1] + sorted(times[1:], key=lambda entry: entry[0])


def decode(context_lens, heads, fp8, configs):
    caches, tables, scales = caches_of(context_lens, heads[1], fp8)
    q, batch = make_q(len(context_lens), *heads), len(context_lens)
    plan = DecodePlan.create(batch, *heads, HEAD_DIM, "cuda")
    plan.update(int32(range(batch)), int32(context_lens))

    def make_calls(config):
        options = {"kv_scales": scales, "config": config}
        return [lambda c=c: paged_decode(q, c[0], c[1], tables, SCALE, plan, **options) for c in caches]

    return timed(configs, make_calls)


def prefill(q_lens, heads, fp8, configs, tma):
    caches, tables, scales = caches_of(q_lens, heads[1], fp8)
    q, lens, rows = make_q(sum(q_lens), *heads), int32(q_lens), int32(range(len(q_lens)))
    cu = int32([0, *q_lens]).cumsum(0, dtype=torch.int32)

    def make_calls(config):
        options = {"kv_scales": scales, "config": config, "tma": tma}
        return [lambda c=c: paged_prefill(q, c[0], c[1], tables, rows, cu, lens, SCALE, **options) for c in caches[:4]]

    return timed(configs, make_calls)


def store(tokens, heads, fp8):
    caches, _, scales = caches_of([tokens], heads[1], fp8)
    qkv = torch.randn(tokens, (heads[0] + 2 * heads[1]) * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    weight, cos_sin = torch.ones(HEAD_DIM, dtype=torch.bfloat16, device="cuda"), torch.rand(tokens, HEAD_DIM).cuda()
    places = int32(range(tokens))
    args = (qkv, places, places, cos_sin, weight, weight, 1e-6)
    return graph_time([lambda c=c: norm_rope_store(*args, c[0], c[1], heads[0], scales) for c in caches[:4]])


def show(title, times, num_bytes, copy):
    cells = (f"{t:8.1f} us {num_bytes / t * 1e6 / copy:4.0%} {config or 'built in'}" for t, config in times[:4])
    print(f"{title:44}" + "  ".join(cells), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="all configurations, not the built-in one alone")
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 8), help="query and KV heads")
    args = parser.parse_args()
    heads, copy = tuple(args.heads), copy_rate()
    print(f"{torch.cuda.get_device_name()}; copy rate {copy / 1e12:.2f} TB/s; {heads} heads, blocks of {BLOCK_SIZE}")
    print("decode built in:", decode_attention.tile_config(HEAD_DIM, 2, BLOCK_SIZE, False, True))
    for (name, lens), fp8 in itertools.product(DECODES.items(), (False, True)):
        times = decode(lens, heads, fp8, DECODE_CONFIGS if args.sweep and fp8 else [])
        show(
            f"decode {name} {'fp8' if fp8 else 'bf16'}",
            times,
            (2 if fp8 else 4) * heads[1] * HEAD_DIM * sum(lens),
            copy,
        )
    print("prefill built in:", prefill_attention.tile_config(HEAD_DIM, 2, BLOCK_SIZE, True, False))
    for (name, lens), (fp8, tma) in itertools.product(
        PREFILLS.items(), ((False, None), (True, None), (True, False), (True, True))
    ):
        if tma is not None and not args.sweep:
            continue
        times = prefill(lens, heads, fp8, PREFILL_CONFIGS if args.sweep and tma is not None else [], tma)
        title = f"prefill {name} {'fp8' if fp8 else 'bf16'}{'' if tma is None else f' tma={tma}'}"
        show(title, times, (2 if fp8 else 4) * heads[1] * HEAD_DIM * sum(lens), copy)
    for tokens in (64, 256, 16384):
        print(f"store {tokens}: bf16 {store(tokens, heads, False):.1f} us, fp8 {store(tokens, heads, True):.1f} us")


if __name__ == "__main__":
    main()
