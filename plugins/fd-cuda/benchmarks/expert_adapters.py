"""What LoRA adapters of routed experts cost on this GPU, in microseconds per layer.

    python plugins/fd-cuda/benchmarks/expert_adapters.py [--rank 16]

One CUDA graph of four layers of Qwen3-30B-A3B's experts (128 of 2048 x 768, 8 for each token) with
weights and slots of their own, random numbers in bfloat16: routing, both products and the weighted
sum. Plain: the driver without adapters. No adapter: a captured step in which no row has any. Eight
adapters: each row has one of them in turn. Medians of several replays, the variants in turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec

from fastdeploy_testing.drivers import build_kernel_table
from fd_cuda.kernels.expert_lora import lora_experts
from fd_cuda.moe import CudaMoE

EXPERTS, TOP_K, HIDDEN, WIDTH, SLOTS = 128, 8, 2048, 768, 8
LAYERS, REPLAYS = 4, 25
TOKENS = (1, 16, 64, 256, 2048)


def random(*size: int, spread: float) -> torch.Tensor:
    return torch.empty(*size, device="cuda", dtype=torch.bfloat16).normal_(std=spread)


class Adapters:
    """contracts.moe.ExpertAdapters of one layer."""

    def __init__(self, rank: int) -> None:
        many = SLOTS * EXPERTS
        self._gate_up = (
            random(many, 2 * rank, HIDDEN, spread=HIDDEN**-0.5),
            random(many, 2 * WIDTH, rank, spread=0.3),
        )
        self._down = (
            random(many, rank, WIDTH, spread=WIDTH**-0.5),
            random(many, HIDDEN, rank, spread=0.3),
        )
        self.slots: Any = None

    def gate_up(self, y: Any, x: Any, topk_ids: Any) -> Any:
        """See ExpertAdapters."""
        ends = (WIDTH, 2 * WIDTH)
        return lora_experts(y, x, *self._gate_up, ends, self.slots, topk_ids, EXPERTS)

    def down(self, y: Any, x: Any, topk_ids: Any) -> Any:
        """See ExpertAdapters."""
        return lora_experts(y, x, *self._down, (HIDDEN,), self.slots, topk_ids, EXPERTS)


def captured(layers: Callable[[], None]) -> torch.cuda.CUDAGraph:
    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    rank = parser.parse_args().rank
    table = build_kernel_table("cuda", {"tensor_library": "torch", "dtype": "bfloat16"})
    spec = MoESpec(RoutingSpec(EXPERTS, TOP_K), HIDDEN, WIDTH, "bfloat16")
    driver = CudaMoE(spec, None, table)  # type: ignore[arg-type]
    weights = [
        driver.prepare_weights(
            random(EXPERTS, 2 * WIDTH, HIDDEN, spread=HIDDEN**-0.5),
            random(EXPERTS, HIDDEN, WIDTH, spread=WIDTH**-0.5),
        )
        for _ in range(LAYERS)
    ]
    adapters = [Adapters(rank) for _ in range(LAYERS)]

    def plain(x: torch.Tensor, logits: torch.Tensor) -> None:
        for own, scores in zip(weights, logits, strict=True):
            driver.forward(x, own, scores, None, None, None)

    def adapted(x: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor) -> None:
        for own, scores, added in zip(weights, logits, adapters, strict=True):
            added.slots = slots
            ids, shares = table["moe_routing"](scores, None, spec.routing)
            driver.forward_adapted(x, own, ids, shares, added)

    print("| tokens | plain | no adapter | eight adapters |\n|---|---|---|---|")
    for tokens in TOKENS:
        x = random(tokens, HIDDEN, spread=1.0)
        logits = torch.randn(LAYERS, tokens, EXPERTS, device="cuda")
        in_turn = torch.arange(tokens, device="cuda", dtype=torch.int32) % SLOTS
        nobody = torch.full_like(in_turn, -1)  # replays read it: it has to outlive the capture
        graphs = [
            captured(partial(plain, x, logits)),
            captured(partial(adapted, x, logits, nobody)),
            captured(partial(adapted, x, logits, in_turn)),
        ]
        times = zip(*([replay_us(graph) for graph in graphs] for _ in range(REPLAYS)), strict=True)
        figures = " | ".join(f"{statistics.median(own):.1f}" for own in times)
        print(f"| {tokens} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
