"""Time float8 linear layers beside bfloat16 ones on a GPU, at a model's shapes. Run as a script; prints microseconds.

A layer's weights are rotated through more memory than the L2 cache has. "in all" is a layer as the engine runs it, with
the kernel that quantises its input ("split": in parts over K, which the norm behind it adds up); "GEMM" is torch's
scaled GEMM alone, in both of its ways to add up.
"""

import argparse

import torch
import torch.nn.functional as F

from nanovllm.kernels import fp8_reference
from nanovllm.kernels.fp8_linear import fp8_linear, quantize_rows, small_products
from nanovllm.kernels.fp8_split_gemm import fp8_split_linear
from nanovllm.kernels.small_gemm import small_linear
from tests.kernels.bench_attention import graph_time

SHAPES = {  # (out, in) of qkv, o, gate and up, down
    "qwen3-0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "qwen3-14b": [(7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)],
}
ROTATED_BYTES = 256 << 20
SMALL_CONFIGS = [(16, 128, 4, 4), (16, 128, 4, 3), (16, 256, 4, 3), (16, 128, 8, 3), (32, 128, 4, 3), (16, 64, 8, 4)]


def scaled_mm(values, scales, weight, weight_scales, fast):
    return torch._scaled_mm(
        values,
        weight.t(),
        scale_a=scales[:, None],
        scale_b=weight_scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def row_times(dense, layers, rows):
    """Microseconds by name, for copies of a layer in bfloat16 and in float8."""
    out, columns = dense[0].shape
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    values, scales = quantize_rows(x)
    plain = F.linear if rows > 16 or out > 16384 else small_linear
    times = {
        "bf16": graph_time([lambda w=w: plain(x, w, None) for w in dense]),
        "in all": graph_time([lambda w=w: fp8_linear(x, *w) for w in layers]),
        "quantise": graph_time([lambda: quantize_rows(x)] * len(layers)),
        "GEMM fast": graph_time([lambda w=w: scaled_mm(values, scales, *w, True) for w in layers]),
        "GEMM exact": graph_time([lambda w=w: scaled_mm(values, scales, *w, False) for w in layers]),
    }
    if rows <= 256:
        times["in all, split"] = graph_time([lambda w=w: fp8_split_linear(x, *w) for w in layers])
    for config in SMALL_CONFIGS if rows <= 16 else []:
        options = (None, torch.bfloat16, config)
        calls = [lambda w=w, o=options: small_products(values, scales, *w, *o) for w in layers]
        times[f"small {config}"] = graph_time(calls)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-14b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 2048, 16384])
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, args.shape)
    for out, columns in SHAPES[args.shape]:
        copies = max(2, ROTATED_BYTES // (out * columns))
        dense = [torch.randn(out, columns, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
        layers = [fp8_reference.quantize_weight(weight) for weight in dense]
        for rows in args.rows:
            cells = "  ".join(f"{name} {time:.1f}" for name, time in row_times(dense, layers, rows).items())
            print(f"{out:6} x {columns:6}, {rows:6} rows: {cells}", flush=True)


if __name__ == "__main__":
    main()
