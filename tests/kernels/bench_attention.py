"""Time the attention kernels on a GPU, beside flash-attn where it is installed. Run as a script; prints a table.

Decode times are those of CUDA-graph replays over enough copies of the cache to defeat the L2 cache, planning excluded
(it has a line of its own); "copy" is the share of the measured device-to-device copy rate at which keys and values are
read. Where several versions of flash-attn hide behind one module and the variable FA picks one, FA may list more
("2,3"): each is timed in a process of its own. Builds of version 2 without code for the card take minutes to start.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
import time

import torch
from triton.testing import do_bench

from nanovllm.kernels.decode_attention import paged_decode
from nanovllm.kernels.decode_plan import DecodePlan
from nanovllm.kernels.prefill_attention import paged_prefill

BLOCK_SIZE = 256
HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
SHAPES = [(16, 8), (40, 8)]  # query heads, KV heads
ROTATED_BYTES = 512 << 20


def lengths(count, seed=0):
    rng = random.Random(seed)
    return [rng.randint(200, 2000) for _ in range(count)]


DECODES = {"1 x 600": [600], "1 x 8000": [8000], **{f"{n} x 200-2000": lengths(n) for n in (8, 64, 256)}}
PREFILLS = {"16 x 1k": [1024] * 16, "8k": [8192], "32k": [32768]}


def graph_time(calls, repeats=9):
    """Median microseconds a call takes, of replays of a graph of all `calls`."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return sorted(times[2:])[repeats // 2]


def make_inputs(context_lens, num_kv_heads):
    """Copies of a paged cache, of ROTATED_BYTES in all, and the table of its scattered blocks."""
    need = [-(-n // BLOCK_SIZE) for n in context_lens]
    one = 4 * sum(need) * BLOCK_SIZE * num_kv_heads * HEAD_DIM
    copies = min(128, -(-ROTATED_BYTES // one))
    shape = (copies, 2, sum(need), BLOCK_SIZE, num_kv_heads, HEAD_DIM)
    caches = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    tables = torch.zeros((len(need), max(need)), dtype=torch.int32)
    free = torch.randperm(sum(need), dtype=torch.int32)
    for row, blocks in enumerate(need):
        tables[row, :blocks], free = free[:blocks], free[blocks:]
    return caches, tables.cuda()


def make_q(tokens, num_q_heads, num_kv_heads):
    fused = torch.randn((tokens, num_q_heads + 2 * num_kv_heads, HEAD_DIM), dtype=torch.bfloat16, device="cuda")
    return fused[:, :num_q_heads]


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def flash(q, k, v, tables, cu, lens, longest_q, longest):
    """flash-attn's paged attention."""
    import flash_attn

    if hasattr(flash_attn, "_attend"):  # the kernel alone: the public functions launch small ones around it
        return flash_attn._attend(q, k, v, cu, longest_q, longest, None, lens, tables, SCALE, True)
    if longest_q == 1:
        return flash_attn.flash_attn_with_kvcache(
            q[:, None], k, v, cache_seqlens=lens, block_table=tables, softmax_scale=SCALE, causal=True
        )
    ends = torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32)])
    return flash_attn.flash_attn_varlen_func(
        q, k, v, cu, ends, longest_q, longest, softmax_scale=SCALE, causal=True, block_table=tables
    )


def decode_time(ours, context_lens, num_q_heads, num_kv_heads, num_tokens=None):
    """`num_tokens`: of a step with prompts, whose tokens are sequences without context to decode attention."""
    batch = len(context_lens)
    caches, tables = make_inputs(context_lens, num_kv_heads)
    q = make_q(batch, num_q_heads, num_kv_heads)
    lens, rows, cu = int32(context_lens), int32(range(batch)), int32(range(batch + 1))
    if not ours:
        longest = max(context_lens)
        return graph_time([lambda c=c: flash(q, c[0], c[1], tables, cu, lens, 1, longest) for c in caches])
    plan = DecodePlan.create(num_tokens or batch, num_q_heads, num_kv_heads, HEAD_DIM, "cuda")
    if num_tokens is None:
        plan.update(rows, lens)
        return graph_time([lambda c=c: paged_decode(q, c[0], c[1], tables, SCALE, plan) for c in caches])
    rest = [0] * (num_tokens - batch)
    q = make_q(num_tokens, num_q_heads, num_kv_heads)
    plan.update(torch.cat([rows, int32(rest)]), torch.cat([lens, int32(rest)]), sparse=True)
    return graph_time([lambda c=c: paged_decode(q, c[0], c[1], tables, SCALE, plan, sparse=True) for c in caches])


def prefill_time(ours, q_lens, num_q_heads, num_kv_heads):
    caches, tables = make_inputs(q_lens, num_kv_heads)
    q = make_q(sum(q_lens), num_q_heads, num_kv_heads)
    lens, rows, longest = int32(q_lens), int32(range(len(q_lens))), max(q_lens)
    cu = int32([0, *q_lens]).cumsum(0, dtype=torch.int32)
    if not ours:
        return graph_time([lambda c=c: flash(q, c[0], c[1], tables, cu, lens, longest, longest) for c in caches])
    return graph_time([lambda c=c: paged_prefill(q, c[0], c[1], tables, rows, cu, lens, SCALE) for c in caches])


def plan_time(batch):
    plan = DecodePlan.create(batch, 16, 8, HEAD_DIM, "cuda")
    lens, rows = int32(lengths(batch)), int32(range(batch))
    return graph_time([lambda: plan.update(rows, lens)] * 50)


def host_time(num_q_heads=16, num_kv_heads=8, repeats=20):
    """Microseconds the host needs to launch a plan, a decode and a prefill of 64 sequences."""
    context_lens = lengths(64)
    caches, tables = make_inputs(context_lens, num_kv_heads)
    (k, v), q = caches[0], make_q(64, num_q_heads, num_kv_heads)
    lens, rows, cu = int32(context_lens), int32(range(64)), int32(range(65))
    plan = DecodePlan.create(64, num_q_heads, num_kv_heads, HEAD_DIM, "cuda")
    calls = {
        "plan": lambda: plan.update(rows, lens),
        "decode": lambda: paged_decode(q, k, v, tables, SCALE, plan),
        "prefill": lambda: paged_prefill(q, k, v, tables, rows, cu, lens, SCALE),
    }
    times = {}
    for name, call in calls.items():
        call()
        samples = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(20):
                call()
            samples.append((time.perf_counter() - begin) / 20 * 1e6)
        times[name] = sorted(samples)[repeats // 2]
    return times


def copy_rate():
    """Bytes a second, read and written, of a device-to-device copy; not in a graph, where copies are slower."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source), warmup=10, rep=50, return_mode="median")
    return 8 * source.numel() / (milliseconds * 1e-3)


def measure(ours):
    """Microseconds of every case: {"kind|shape|case": time}."""
    times = {}
    for heads in SHAPES:
        for name, context_lens in DECODES.items():
            times[f"decode|{heads[0]}/{heads[1]}|{name}"] = decode_time(ours, context_lens, *heads)
        for name, q_lens in PREFILLS.items():
            times[f"prefill|{heads[0]}/{heads[1]}|{name}"] = prefill_time(ours, q_lens, *heads)
    return times


def rate(case, microseconds, copy):
    kind, heads, name = case.split("|")
    num_q_heads, num_kv_heads = map(int, heads.split("/"))
    if kind == "decode":
        bytes_read = 4 * num_kv_heads * HEAD_DIM * sum(DECODES[name])
        return f"{bytes_read / microseconds * 1e6 / copy:5.0%} copy"
    flops = 2 * num_q_heads * HEAD_DIM * sum(n * (n + 1) for n in PREFILLS[name])
    return f"{flops / microseconds / 1e6:4.0f} TFLOP/s"


def main():
    if len(sys.argv) > 1:
        print(json.dumps(measure(ours=False)))
        return
    results = {"nano-vllm": measure(ours=True)}
    if importlib.util.find_spec("flash_attn"):
        for version in os.environ.get("FA", "").split(","):
            command = [sys.executable, __file__, "flash"]
            child = subprocess.run(command, env={**os.environ, "FA": version}, capture_output=True, text=True)
            if child.returncode:
                print(child.stderr[-2000:], file=sys.stderr)
            else:
                results[f"flash-attn {version}".strip()] = json.loads(child.stdout.splitlines()[-1])
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}; copy rate {copy / 1e12:.2f} TB/s; bfloat16, blocks of {BLOCK_SIZE} tokens")
    print(f"{'':36}" + "".join(f"{name:>28}" for name in results))
    for case in results["nano-vllm"]:
        cells = (f"{t[case]:9.1f} us {rate(case, t[case], copy):>13}" for t in results.values())
        print(f"{case.replace('|', '  '):36}" + "".join(f"{cell:>28}" for cell in cells))
    for batch, num_tokens in ((100, 256), (130, 384), (250, 384)):
        context_lens = lengths(batch)
        alone, beside = (decode_time(True, context_lens, *SHAPES[1], tokens) for tokens in (None, num_tokens))
        print(f"decode {batch} x 200-2000 alone {alone:.1f} us, in a graph of {num_tokens} tokens {beside:.1f} us")
    print("plan, once a step: " + ", ".join(f"{n} sequences {plan_time(n):.1f} us" for n in (1, 256)))
    print("host, a launch: " + ", ".join(f"{name} {t:.0f} us" for name, t in host_time().items()))


if __name__ == "__main__":
    main()
