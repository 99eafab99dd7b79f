"""Times of single operations on one GPU, beside what bytes and cuBLAS allow.

    python plugins/fd-cuda/benchmarks/kernels.py products [MODEL...]
    python plugins/fd-cuda/benchmarks/kernels.py experts sampling

Every figure is a median of graph replays over rotating weights, so that the card's cache does not
help. "floor" is the bytes that must move over the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from fastdeploy_core.contracts.moe import RoutingSpec
from timing import time_s

from fd_cuda.kernels import experts, filtering, linear, routing, sampling
from fd_cuda.kernels.plans import LIBRARY, Product, choose

ROWS = (1, 8, 16, 64, 256)
EPS = 1e-5
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int  # of dense layers; of the shared experts in mixture models
    vocab: int
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0

    @property
    def qkv(self) -> tuple[int, int]:
        return (self.heads + 2 * self.kv_heads) * 128, self.hidden

    @property
    def output(self) -> tuple[int, int]:
        return self.hidden, self.heads * 128


MODELS = {
    "ernie-0.3b": Model(18, 1024, 16, 2, 3072, 103424),
    "qwen3-0.6b": Model(28, 1024, 16, 8, 3072, 151936),
    "ernie-21b-a3b": Model(28, 2560, 20, 4, 3072, 103424, 64, 6, 1536),
    "qwen3-30b-a3b": Model(48, 2048, 32, 4, 0, 151936, 128, 8, 768),
    "ernie-300b-a47b": Model(54, 8192, 64, 8, 0, 103424, 64, 8, 3584),
}


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda").mul_(0.02)


def bandwidth() -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    for _ in range(50):  # the clocks have to come up first
        target.copy_(source)
    return 8 * source.numel() / time_s(lambda: target.copy_(source))


def products_of(model: Model) -> list[tuple[str, bool, int, int]]:
    found = [
        ("plain", True, *model.qkv),
        ("add", False, *model.output),
    ]
    if model.experts and model.intermediate:
        found += [
            ("gated", False, 2 * model.intermediate, model.hidden),
            ("plain", False, *model.qkv),
            ("add", False, model.hidden, model.intermediate),
            ("gated", True, 2 * 12288, model.hidden),  # the dense first layer
            ("add", False, model.hidden, 12288),
        ]
    elif model.intermediate:
        found += [
            ("gated", True, 2 * model.intermediate, model.hidden),
            ("add", False, model.hidden, model.intermediate),
        ]
    else:
        found.append(("plain", False, *model.qkv))
    return found


def time_product(
    plan: object, kind: str, has_norm: bool, width: int, depth: int, rows: int
) -> float:
    count = max(2, min(16, (160 << 20) // (width * depth * 2) + 1))
    weights = [weight(width, depth) for _ in range(count)]
    gain, x = torch.rand(depth, device="cuda").to(DTYPE), weight(rows, depth)
    residual = weight(rows, width)

    def run() -> None:
        for w in weights:
            linear.compute(
                plan, kind, x, gain if has_norm else None, EPS, w, None,
                residual if kind == "add" else None,
            )  # fmt: skip

    return time_s(run, count)


def products(names: list[str], rate: float) -> None:
    print("\nproducts, us: floor / cuBLAS and Triton around it / ours (plan)")
    for name in names:
        for kind, has_norm, width, depth in products_of(MODELS[name]):
            product = Product(kind, has_norm, width, depth, "bfloat16")
            cells = []
            for rows in ROWS:
                plan = choose(product, rows)
                shape = (kind, has_norm, width, depth, rows)
                floor = (width * depth + rows * (width + depth)) * 2 / rate * 1e6
                library, ours = time_product(LIBRARY, *shape), time_product(plan, *shape)
                cells.append(f"{rows}: {floor:.1f}/{library * 1e6:.1f}/{ours * 1e6:.1f} ({plan})")
            print(f"{name} {product.key}: " + "; ".join(cells), flush=True)


def moe(names: list[str], rate: float) -> None:
    print("\nexperts, us: floor of one layer's routed experts / ours")
    for name in names:
        model = MODELS[name]
        if not model.experts:
            continue
        layers = [
            (
                weight(model.experts, 2 * model.expert_width, model.hidden),
                weight(model.experts, model.hidden, model.expert_width),
            )
            for _ in range(2)
        ]
        spec = RoutingSpec(model.experts, model.top_k)
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384):
            logits = torch.randn(tokens, model.experts, device="cuda")
            ids, weights = routing.moe_routing(logits, None, spec)
            x = weight(tokens, model.hidden)
            used = len(torch.unique(ids))
            read = used * 3 * model.expert_width * model.hidden * 2
            work = tokens * model.top_k * 6 * model.expert_width * model.hidden
            floor = max(read / rate, work / 790e12)
            run = partial(each_layer, layers, x, ids, weights)
            route = time_s(partial(routing.moe_routing, logits, None, spec))
            print(
                f"{name} {tokens}: floor {floor * 1e6:.0f}; routing {route * 1e6:.1f}; "
                f"{time_s(run, 2, replays=3) * 1e6:.0f}",
                flush=True,
            )


def each_layer(layers: list, x: object, ids: object, weights: object) -> None:
    for gate_up, down in layers:
        experts.moe_experts(x, ids, weights, gate_up, down)


def draws(rate: float) -> None:
    print("\nsampling of 103424 logits, us: floor of one pass over them / ours / torch")
    for rows in ROWS:
        cells = [f"{name} {time_s(run) * 1e6:.1f}" for name, run in draw_runs(rows).items()]
        print(
            f"{rows} rows, floor {rows * 103424 * 4 / rate * 1e6:.1f}: " + "; ".join(cells),
            flush=True,
        )


def draw_runs(rows: int) -> dict[str, Callable[[], object]]:
    logits = torch.randn(rows, 103424, device="cuda") * 3
    seeds = torch.arange(rows, device="cuda")
    full = partial(torch.full, (rows,), device="cuda")
    k, none, p, one = full(50), full(0), full(0.9), full(1.0)
    zero, min_p = full(0.0), full(0.05)
    counts = torch.zeros(rows, 103424, dtype=torch.int32, device="cuda")
    seen = torch.zeros(rows, 103424, dtype=torch.bool, device="cuda")
    kept = filtering.filter_logits
    return {
        "greedy": lambda: sampling.greedy(logits),
        "torch argmax": lambda: torch.argmax(logits, -1),
        "draw": lambda: sampling.sample(logits, seeds, seeds),
        "copy": lambda: logits.clone(),
        "copy, top_k 50": lambda: kept(logits.clone(), k, one, zero),
        "copy, top_p 0.9": lambda: kept(logits.clone(), none, p, zero),
        "copy, top_k 50 top_p 0.9": lambda: kept(logits.clone(), k, p, zero),
        "copy, min_p": lambda: kept(logits.clone(), none, one, min_p),
        "penalties": lambda: sampling.apply_penalties(logits, zero, zero, one, counts, seen),
        "log_softmax": lambda: sampling.log_softmax(logits),
        "torch sort": lambda: torch.sort(logits, -1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="+", help="products, experts, sampling, or models")
    asked = parser.parse_args().what
    names = [name for name in asked if name in MODELS] or list(MODELS)
    with torch.no_grad():
        rate = bandwidth()
        device = torch.cuda.get_device_name()
        print(f"{device}, torch {torch.__version__}, copy {rate / 1e12:.2f} TB/s, bfloat16")
        if "products" in asked:
            products(names, rate)
        if "experts" in asked:
            moe(names, rate)
        if "sampling" in asked:
            draws(rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
