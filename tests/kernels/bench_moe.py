"""Time Qwen3-30B-A3B's layer of experts on a GPU, beside what reading the experts in use takes at the copy rate.

    python -m tests.kernels.bench_moe [tune [SECONDS]]

A call is routing, both GEMMs and the norm that adds parts up, in a CUDA graph over layers with weights of their own.
With `tune` tiles listed here are timed as well, GEMM by GEMM, until the seconds (default 60) are over.
"""

import sys
import time

import torch

from nanovllm.kernels.moe import Tile, _expert_gemm, moe, moe_config
from nanovllm.kernels.moe_routing import route
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.layers.ops import OVERLAP_ROWS
from tests.kernels.bench_elementwise import bf16, copy_rate, graph_time

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, LAYERS = 128, 8, 2048, 768, 4
ROWS = (1, 8, 32, 128, 256, 2048)
PLAN = ((256, 32), (256, 16), (1, 16), (8, 16), (32, 16), (2048, 128), (128, 16), (128, 32), (256, 64), (2048, 64))
GATE_UP = {  # by pairs in a tile: columns, inner, warps, stages
    16: [(64, 128, 4, 3), (64, 64, 4, 5), (64, 128, 4, 4), (64, 64, 4, 8), (32, 128, 4, 4), (128, 64, 4, 4)],
    32: [(64, 128, 4, 2), (64, 64, 4, 5), (64, 64, 4, 8), (128, 64, 4, 3), (128, 64, 8, 4)],
    64: [(64, 64, 4, 4), (64, 64, 4, 6), (128, 64, 8, 3), (128, 64, 8, 4), (64, 128, 4, 2)],
    128: [(128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 4), (64, 64, 8, 4), (128, 32, 8, 5)],
}
DOWN = {
    16: [(64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6), (128, 128, 4, 3), (128, 64, 4, 4), (32, 128, 4, 4)],
    32: [(64, 128, 4, 3), (64, 64, 4, 6), (128, 64, 4, 4), (128, 128, 8, 3)],
    64: [(128, 64, 4, 4), (64, 64, 4, 5), (128, 64, 8, 4), (128, 128, 8, 3)],
    128: [(128, 64, 8, 4), (128, 64, 8, 3), (256, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 4)],
}


class Layers:
    """Weights, and what a step of some rows brings."""

    def __init__(self):
        self.gate_up = [bf16(EXPERTS, 2 * INTERMEDIATE, HIDDEN).mul_(HIDDEN**-0.5) for _ in range(LAYERS)]
        self.down = [bf16(EXPERTS, HIDDEN, INTERMEDIATE).mul_(INTERMEDIATE**-0.5) for _ in range(LAYERS)]
        self.inputs = {rows: (bf16(rows, HIDDEN), [bf16(rows, EXPERTS) for _ in range(LAYERS)]) for rows in ROWS}
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")

    def experts(self, rows):
        """Experts in use, the layers' mean."""
        logits = self.inputs[rows][1]
        return sum(len(layer.topk(TOP_K).indices.unique()) for layer in logits) / LAYERS

    def time(self, rows):
        x, logits = self.inputs[rows]
        residual, pdl = bf16(rows, HIDDEN), rows <= OVERLAP_ROWS

        def call(layer):
            parts = moe(x, logits[layer], self.gate_up[layer], self.down[layer], TOP_K, True, pdl=pdl)
            add_rms_norm(parts, residual, self.norm, 1e-6, pdl=pdl)

        return graph_time([lambda layer=layer: call(layer) for layer in range(LAYERS)])

    def time_routing(self, rows):
        block_m = moe_config(rows * TOP_K, EXPERTS, torch.bfloat16).block_m
        return graph_time([lambda x=x: route(x, TOP_K, True, block_m) for x in self.inputs[rows][1]])

    def time_gemm(self, rows, block_m, gated, tile):
        x, logits = self.inputs[rows]
        inner = bf16(rows * TOP_K, INTERMEDIATE)
        parts = bf16(TOP_K, rows, HIDDEN)
        routings = [route(layer, TOP_K, True, block_m) for layer in logits]

        def call(layer):
            tensors = (x, self.gate_up[layer], inner) if gated else (inner, self.down[layer], parts)
            _expert_gemm(*tensors, routings[layer], TOP_K, gated, block_m, Tile(*tile), rows <= OVERLAP_ROWS)

        return graph_time([lambda layer=layer: call(layer) for layer in range(LAYERS)])


def tune(layers, rate, deadline):
    for rows, block_m in PLAN:
        for gated, tiles in ((True, GATE_UP[block_m]), (False, DOWN[block_m])):
            floor = layers.experts(rows) * (2 if gated else 1) * HIDDEN * INTERMEDIATE * 2 / rate * 1e6
            found = []
            for tile in tiles:
                if time.time() > deadline:
                    return
                try:
                    found.append((layers.time_gemm(rows, block_m, gated, tile), tile))
                except Exception as error:  # tiles that do not fit
                    found.append((float("inf"), (*tile, type(error).__name__)))
            name = "gate_up" if gated else "down"
            best = ", ".join(f"{t:.1f} {tile}" for t, tile in sorted(found)[:5])
            print(f"{rows:5} rows, tiles of {block_m:3}, {name:7} floor {floor:6.1f} us: {best}", flush=True)


def main():
    start = time.time()
    layers, rate = Layers(), copy_rate()
    print(f"{torch.cuda.get_device_name()}; copy rate {rate / 1e12:.2f} TB/s; bfloat16")
    for rows in ROWS:
        t, used = layers.time(rows), layers.experts(rows)
        size = 3 * HIDDEN * INTERMEDIATE
        floor = used * size * 2 / rate * 1e6
        print(
            f"{rows:5} rows: {t:7.1f} us, {used:5.1f} experts in {floor:5.1f} us = {floor / t:4.0%}, "
            f"{2 * rows * TOP_K * size / t / 1e6:3.0f} TFLOP/s; routing alone {layers.time_routing(rows):.1f} us",
            flush=True,
        )
    if "tune" in sys.argv[1:]:
        tune(layers, rate, start + float((sys.argv[2:] or [60])[0]))


if __name__ == "__main__":
    main()
