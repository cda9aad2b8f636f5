"""Time the kernels around attention on a GPU: those of each layer, the sampler, and linear layers of few rows.

Run as a script. Times are medians of CUDA-graph replays; large inputs rotate among copies that defeat the L2 cache,
small ones stay in it as they do in an engine. Arguments pick parts (chains, layers, sampler, linears, host; all by
default); with `tune` every tile size listed here is timed as well.
"""

import sys
import time

import torch
import torch.nn.functional as F

from nanovllm.kernels import reference
from nanovllm.kernels.norm_rope_store import norm_rope_store
from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.kernels.sampling import gumbel_sample
from nanovllm.kernels.silu_mul import silu_mul
from nanovllm.kernels.small_gemm import small_linear

HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 1024, 16, 8, 128, 3072, 151_936, 28
QKV = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
TOKENS = [1, 8, 64, 256, 16384]
ROTATED_BYTES = 256 << 20
EPS = 1e-6
LINEARS = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, Q_HEADS * HEAD_DIM),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "head": (VOCAB, HIDDEN),
}
TUNE = "tune" in sys.argv[1:]
RMS = [{}, *({"num_warps": w} for w in (1, 2, 4, 8))]
SILU = [{}, *({"block": b, "num_warps": w} for b, w in ((512, 2), (1024, 2), (2048, 4), (2048, 8)))]
ROPE = [{}, *({"block_heads": h, "num_warps": w} for h, w in ((2, 1), (4, 1), (8, 1), (8, 4), (16, 4)))]
SAMPLE = [
    {},
    *(
        {"block": b, "num_warps": w, "target_programs": p}
        for b, w, p in ((512, 2, 2112), (1024, 4, 528), (1024, 4, 2112), (2048, 4, 1056), (2048, 8, 1056))
    ),
]
CHAIN = [(2, 1024, 1), (1, 1024, 1), (1, 2048, 1), (1, 4096, 1), (2, 2048, 2), (4, 1024, 4), (2, 512, 1)]
CHAIN += [(16, 64, 4, 4), (16, 128, 4, 3), (16, 64, 4, 3), (16, 128, 2, 4)]


def bf16(*shape):
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def graph_time(calls, repeats=7):
    """Median microseconds a call takes, of replays of a graph of all `calls`."""
    calls[0]()
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


def copy_rate(repeats=20):
    """Bytes a second, read and written, of a device-to-device copy; outside a graph, whose copy nodes are slower."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 8 * source.numel() / sorted(times)[repeats // 2]


def copies(one_bytes):
    return max(2, min(20, -(-ROTATED_BYTES // one_bytes)))


def report(name, one_bytes, make_call, variants, copy):
    """Print the time of each variant; `make_call(options)` gives a function of a copy's index."""
    line = f"{name:24}"
    for options in variants if TUNE else variants[:1]:
        call = make_call(options)
        duration = graph_time([lambda i=i, call=call: call(i) for i in range(copies(one_bytes))])
        label = ",".join(str(value) for value in options.values())
        rate = one_bytes / duration * 1e-3
        line += f"  {label or f'{rate:6.0f} GB/s {rate * 1e9 / copy:4.0%}'} {duration:7.2f} us"
    print(line, flush=True)


def layer_kernels(tokens, copy):
    size = 2 * tokens
    n = copies(3 * size * HIDDEN)
    xs, residuals, weight = bf16(n, tokens, HIDDEN), bf16(n, tokens, HIDDEN), bf16(HIDDEN)
    report(
        f"rms_norm {tokens}", 2 * size * HIDDEN, lambda o: lambda i: rms_norm(xs[i % n], weight, EPS, **o), RMS, copy
    )
    report(
        f"add_rms_norm {tokens}",
        4 * size * HIDDEN,
        lambda o: lambda i: add_rms_norm(xs[i % n], residuals[i % n], weight, EPS, **o),
        RMS,
        copy,
    )
    gates = bf16(n, tokens, 2 * INTERMEDIATE)
    report(f"silu_mul {tokens}", 3 * size * INTERMEDIATE, lambda o: lambda i: silu_mul(gates[i % n], **o), SILU, copy)
    qkvs, (k_cache, v_cache) = bf16(n, tokens, QKV), bf16(2, 128, 256, KV_HEADS, HEAD_DIM)
    positions = torch.randint(0, 1024, (tokens,), device="cuda")
    slots = torch.randperm(128 * 256, device="cuda")[:tokens].int()
    cos_sin, q_weight, k_weight = torch.randn(1024, HEAD_DIM, device="cuda"), bf16(HEAD_DIM), bf16(HEAD_DIM)
    report(
        f"norm_rope_store {tokens}",
        2 * size * QKV,
        lambda o: (
            lambda i: norm_rope_store(
                qkvs[i % n], positions, slots, cos_sin, q_weight, k_weight, EPS, k_cache, v_cache, Q_HEADS, **o
            )
        ),
        ROPE,
        copy,
    )


def sampler(rows, copy):
    n = copies(2 * rows * VOCAB)
    logits = bf16(n, rows, VOCAB)
    seeds, positions = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda")
    for name, temperature in (("drawn", 0.6), ("greedy", 0.0)):
        temperatures = torch.full((rows,), temperature, device="cuda")

        def make(options, temperatures=temperatures):
            return lambda i: gumbel_sample(logits[i % n], temperatures, seeds, positions, **options)

        report(f"sample {name} {rows}", 2 * rows * VOCAB, make, SAMPLE, copy)


def linears(copy):
    for name, (n, k) in LINEARS.items():
        count = 2 if name == "head" else LAYERS
        weights = bf16(count, n, k)
        for rows in (1, 2, 4, 8, 16):
            x = bf16(rows, k)

            def measure(function, weights=weights, x=x):
                return graph_time([lambda w=w: function(x, w) for w in weights])

            cells = {"cuBLAS": measure(F.linear), "ours": measure(small_linear)}
            best = min(cells.values())
            line = "  ".join(f"{label.replace(' ', '')} {t:.2f}" for label, t in cells.items())
            print(f"linear {name} {rows}: {line}; best {2 * n * k / best * 1e6 / copy:.0%}", flush=True)


def chains(copy):
    """All kernels of 28 layers but attention, one after the other: what a decode step costs beside it."""
    weights = [[bf16(*LINEARS[name]) / 32 for name in ("qkv", "o", "gate_up", "down")] for _ in range(LAYERS)]
    size = 2 * sum(w.numel() for w in weights[0]) * LAYERS
    k_cache, v_cache = bf16(2, 16, 256, KV_HEADS, HEAD_DIM)
    cos_sin, norm, head_norm = torch.randn(1024, HEAD_DIM, device="cuda"), bf16(HIDDEN), bf16(HEAD_DIM)

    for rows in (1, 2, 4, 8, 16, 64):
        positions = torch.arange(rows, device="cuda")
        slots = positions.int()

        def run(linear, pdl, rows=rows, positions=positions, slots=slots):
            x, residual = bf16(rows, HIDDEN), bf16(rows, HIDDEN)
            for qkv, o, gate_up, down in weights:
                x, residual = add_rms_norm(x, residual, norm, EPS, pdl=pdl)
                q = norm_rope_store(
                    linear(x, qkv),
                    positions,
                    slots,
                    cos_sin,
                    head_norm,
                    head_norm,
                    EPS,
                    k_cache,
                    v_cache,
                    Q_HEADS,
                    pdl=pdl,
                )
                x, residual = add_rms_norm(linear(q.flatten(1), o), residual, norm, EPS, pdl=pdl)
                x = linear(silu_mul(linear(x, gate_up), pdl=pdl), down)
            return x

        kinds = {"cuBLAS": (F.linear, False)}
        if rows <= 16:
            kinds["ours"] = (small_linear, False)
            kinds["ours+PDL"] = (lambda x, w: small_linear(x, w, pdl=True), True)
        for config in CHAIN if TUNE and rows <= 16 else ():
            gemv = len(config) == 3
            if not gemv or rows <= 8:
                options = {"gemv": gemv, "config": config, "pdl": True}
                kinds[str(config)] = (lambda x, w, o=options: small_linear(x, w, **o), True)
        line = f"28 layers, {rows} rows (floor {size / copy * 1e6:.0f} us):"
        for name, (linear, pdl) in kinds.items():
            line += f"  {name} {graph_time([lambda f=linear, p=pdl: run(f, p)]):.0f} us"
        print(line, flush=True)


def host(calls=500):
    """Host time of an eager launch."""
    x, residual, weight, gates = bf16(8, HIDDEN), bf16(8, HIDDEN), bf16(HIDDEN), bf16(8, 2 * INTERMEDIATE)
    functions = {
        "empty": lambda: torch.empty_like(x),
        "rms_norm": lambda: rms_norm(x, weight, EPS),
        "add_rms_norm": lambda: add_rms_norm(x, residual, weight, EPS),
        "silu_mul": lambda: silu_mul(gates),
    }
    line = "host time of a launch:"
    for name, function in functions.items():
        function()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        line += f"  {name} {(time.perf_counter() - begin) / calls * 1e6:.1f} us"
        torch.cuda.synchronize()
    print(line, flush=True)


def main():
    parts = set(sys.argv[1:]) - {"tune"} or {"chains", "layers", "sampler", "linears", "host"}
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}; copy rate {copy / 1e12:.2f} TB/s; bfloat16", flush=True)
    if "chains" in parts:
        chains(copy)
    if "layers" in parts:
        for tokens in TOKENS:
            layer_kernels(tokens, copy)
    if "sampler" in parts:
        for rows in (1, 64, 256):
            sampler(rows, copy)
        logits = bf16(64, VOCAB)
        rows = (torch.ones(64, device="cuda"), torch.arange(64, device="cuda"), torch.arange(64, device="cuda"))
        agree = (gumbel_sample(logits, *rows) == reference.gumbel_sample(logits, *rows)).float().mean()
        print(f"draws that agree with the reference: {agree:.1%}", flush=True)
    if "host" in parts:
        host()
    if "linears" in parts:
        linears(copy)


if __name__ == "__main__":
    main()
