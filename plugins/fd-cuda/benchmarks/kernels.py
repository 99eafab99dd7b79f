"""Times of single operations and of whole decode steps on one GPU, beside what bytes and cuBLAS
allow.

    python plugins/fd-cuda/benchmarks/kernels.py products [MODEL...]
    python plugins/fd-cuda/benchmarks/kernels.py experts sampling step

Every figure is a median of graph replays over rotating weights, so that the card's cache does not
help. "floor" is the bytes that must move over the copy bandwidth measured in the same run. A step
is the whole decoder without its attention, which benchmarks/attention.py times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from fastdeploy_core.contracts.moe import RoutingSpec

from fd_cuda.kernels import experts, filtering, linear, norm, routing, sampling
from fd_cuda.kernels.plans import LIBRARY, Product, choose
from fd_cuda.kernels.tune import time_s

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
                plan = choose(kind, has_norm, (width, depth), DTYPE, rows)
                shape = (kind, has_norm, width, depth, rows)
                floor = (width * depth + rows * (width + depth)) * 2 / rate * 1e6
                library, ours = time_product(LIBRARY, *shape), time_product(plan, *shape)
                cells.append(f"{rows}: {floor:.1f}/{library * 1e6:.1f}/{ours * 1e6:.1f} ({plan})")
            print(f"{name} {product.key}: " + "; ".join(cells), flush=True)


def moe(names: list[str], rate: float) -> None:
    print("\nexperts, us: floor of one layer's routed experts / ours by way")
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
            cells = []
            for way in ways(tokens, model):
                try:
                    run = partial(run_experts, way, x, ids, weights, layers)
                    cells.append((time_s(run, 2, replays=3), str(way)))
                except Exception as error:
                    cells.append((float("inf"), f"{way}: {type(error).__name__} {str(error)[:80]}"))
            cells.sort()
            route = time_s(partial(routing.moe_routing, logits, None, spec))
            print(
                f"{name} {tokens}: floor {floor * 1e6:.0f}; routing {route * 1e6:.1f}; "
                + "; ".join(f"{t * 1e6:.0f} {way}" for t, way in cells[:4]),
                flush=True,
            )


def ways(tokens: int, model: Model) -> list[experts.Tiles]:
    each = tokens * model.top_k / model.experts
    found = []
    if each <= 24:
        found += [experts._FEW_ROWS, experts.Tiles(16, 32, 32, 128, 4, 4)]
        found += [experts.Tiles(16, 32, 64, 256, 4, 3), experts.Tiles(16, 128, 128, 64, 4, 4)]
    if 6 <= each <= 96:
        found.append(experts._SOME_ROWS)
    if each >= 48:
        found.append(experts._MANY_ROWS)
    return found


def run_experts(way: experts.Tiles, x: object, ids: object, weights: object, layers: list) -> None:
    chosen = experts.tiles_for
    experts.tiles_for = lambda *_: way
    try:
        for gate_up, down in layers:
            experts.moe_experts(x, ids, weights, gate_up, down)
    finally:
        experts.tiles_for = chosen


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


def step(names: list[str], rate: float) -> None:
    print("\ndecode step without attention, us a layer: floor / torch / ours")
    for name in names:
        model = MODELS[name]
        count = min(model.layers, 6) if model.experts else model.layers
        stack = [layer_of(model) for _ in range(count)]
        head = weight(model.vocab, model.hidden)
        for rows in ROWS:
            print(f"{name} {rows}: " + step_times(model, stack, head, rows, rate), flush=True)


def step_times(model: Model, stack: list, head: torch.Tensor, rows: int, rate: float) -> str:
    count = len(stack)
    ids = torch.randint(0, model.vocab, (rows,), device="cuda")
    layers = time_s(lambda: ours(model, stack, head, ids, False))
    whole = time_s(lambda: ours(model, stack, head, ids, True))
    moved = sum(w.numel() * 2 for w in stack[0] if w is not None and w.ndim == 2)
    plain = ""
    if model.experts:
        used = model.experts * (1 - (1 - model.top_k / model.experts) ** rows)
        moved += used * 3 * model.expert_width * model.hidden * 2
    else:
        plain = f"torch {time_s(lambda: torch_layers(model, stack, head, ids)) / count * 1e6:.1f}, "
    return (
        f"floor {moved / rate * 1e6:.1f}, {plain}ours {layers / count * 1e6:.1f} us a layer; head "
        f"{(whole - layers) * 1e6:.0f} us (floor {head.numel() * 2 / rate * 1e6:.0f})"
    )


def layer_of(model: Model) -> tuple[torch.Tensor | None, ...]:
    gain = torch.rand(model.hidden, device="cuda").to(DTYPE)
    shared = model.intermediate
    return (
        gain,
        weight(*model.qkv),
        weight(*model.output),
        weight(2 * shared, model.hidden) if shared else None,
        weight(model.hidden, shared) if shared else None,
        weight(model.experts, 2 * model.expert_width, model.hidden) if model.experts else None,
        weight(model.experts, model.hidden, model.expert_width) if model.experts else None,
        torch.randn(model.experts, model.hidden, device="cuda") if model.experts else None,
    )


def ours(model: Model, stack: list, head: torch.Tensor, ids: torch.Tensor, whole: bool) -> None:
    from fd_cuda.kernels import cache, matmul

    x = cache.embedding(ids, head)
    residual: torch.Tensor | None = None
    spec = RoutingSpec(model.experts, model.top_k) if model.experts else None
    for gain, qkv, output, gate_up, down, many_up, many_down, router in stack:
        if residual is None:
            y = linear.norm_linear(x, gain, EPS, qkv, None)
        else:
            y, x = norm.add_rms_norm(x, residual, gain, EPS)
            y = linear.linear(y, qkv, None)
        x = linear.linear_add(y[:, : output.shape[1]], output, None, x)
        residual = None
        if spec is None:
            hidden = linear.gated_linear(x, gain, EPS, gate_up, None)
            x = linear.linear_add(hidden, down, None, x)
            continue
        y, residual = norm.rms_norm(x, gain, EPS), x
        chosen, weights = routing.moe_routing(matmul.linear_float32(y, router), None, spec)
        x = experts.moe_experts(y, chosen, weights, many_up, many_down)
        if gate_up is not None:
            x = linear.linear_add(linear.gated_linear(y, None, 0.0, gate_up, None), down, None, x)
    if whole:
        if residual is not None:
            x = x + residual
        linear.greedy_linear(norm.rms_norm(x, stack[0][0], EPS), head, None)


def torch_layers(model: Model, stack: list, head: torch.Tensor, ids: torch.Tensor) -> None:
    x = head[ids]
    for gain, qkv, output, gate_up, down, *_ in stack:
        y = F.linear(F.rms_norm(x, (model.hidden,), gain, EPS), qkv)
        x = x + F.linear(y[:, : output.shape[1]], output)
        gate, up = F.linear(F.rms_norm(x, (model.hidden,), gain, EPS), gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, down)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="+", help="products, experts, sampling, step, or models")
    asked = parser.parse_args().what
    names = [name for name in asked if name in MODELS] or list(MODELS)
    with torch.no_grad():
        rate = bandwidth()
        device = torch.cuda.get_device_name()
        print(f"{device}, torch {torch.__version__}, copy {rate / 1e12:.2f} TB/s, bfloat16")
        if "products" in asked:
            products(names, rate)
        if "step" in asked:
            step(names, rate)
        if "experts" in asked:
            moe(names, rate)
        if "sampling" in asked:
            draws(rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
