"""Measure which kernel computes a product fastest on this card.

`python -m fd_cuda.kernels.tune OUTPUT.json NxK...` measures shapes and writes a table such as those
in tuned/. At run time plans.py calls `measure` for what no table has.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fastdeploy_core.devices.host_device import usable_cores
from tqdm import tqdm

from . import native
from .linear import compute
from .plans import LIBRARY, ROWS, Plan, Product, candidates
from .rehearsal import suspended

# Weights of one shape are rotated until they are out of the way of the card's cache.
_ROTATED_BYTES = 160 << 20
_MOST_WEIGHTS = 16
_EPS = 1e-5
# The library is left only for what is clearly faster: it is the better tested one.
_MARGIN = 0.97


def measure(product: Product, sizes: tuple[int, ...] = ROWS) -> dict[int, Plan]:
    """The fastest plan for each number of rows."""
    devices = [torch.cuda.current_device()]
    with suspended(), torch.no_grad(), torch.random.fork_rng(devices=devices):
        plans = _measure(product, sizes)
    torch.cuda.empty_cache()  # others measure free memory
    return plans


def _measure(product: Product, sizes: tuple[int, ...]) -> dict[int, Plan]:
    dtype, device = getattr(torch, product.dtype), torch.device("cuda")
    bytes_each = product.width * product.depth * 2
    count = max(2, min(_MOST_WEIGHTS, _ROTATED_BYTES // bytes_each + 1))
    weights = [
        torch.randn(product.width, product.depth, dtype=dtype, device=device).mul_(0.02)
        for _ in range(count)
    ]
    norm = torch.rand(product.depth, dtype=dtype, device=device) + 0.5
    found: dict[int, Plan] = {}
    warm = torch.empty(4096, 4096, dtype=dtype, device=device)
    for _ in range(200):  # the clocks have to come up first
        torch.mm(warm, warm, out=warm)
    name = torch.cuda.get_device_name()
    bar = tqdm(sizes, desc=f"measuring {product.key} on {name}", leave=False, disable=None)
    for size in bar:
        runs = {
            plan: _runs(product, plan, size, weights, norm) for plan in candidates(product, size)
        }
        _compile(runs)
        times = {plan: time_s(run, count) for plan, run in runs.items()}
        best = min(times, key=lambda plan: times[plan])
        found[size] = best if times[best] < _MARGIN * times[LIBRARY] else LIBRARY
    return found


def _runs(
    product: Product, plan: Plan, size: int, weights: list[torch.Tensor], norm: torch.Tensor
) -> Callable[[], None]:
    dtype, device = weights[0].dtype, weights[0].device
    x = torch.randn(size, product.depth, dtype=dtype, device=device)
    residual = torch.zeros(size, product.width, dtype=dtype, device=device)

    def run() -> None:
        for weight in weights:
            compute(
                plan,
                product.epilogue,
                x,
                norm if product.has_norm else None,
                _EPS,
                weight,
                None,
                residual if product.epilogue == "add" else None,
            )

    return run


def _compile(runs: dict[Plan, Callable[[], None]]) -> None:
    """Compilers of several specializations work side by side."""
    device = torch.cuda.current_device()

    def once(run: Callable[[], None]) -> None:
        native.enter(device)  # or cuBLAS warns that the thread has no context
        with torch.cuda.device(device), torch.inference_mode():
            run()

    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(once, runs.values()))


def time_s(run: Callable[[], Any], count: int = 1, repeats: int = 5, replays: int = 8) -> float:
    """Median seconds of one of the `count` launches that `run` queues, as replays of a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / replays / count)
    return statistics.median(times)


def main(arguments: list[str] | None = None) -> int:
    """Measure the shapes given and write a table."""
    import argparse
    import json
    from pathlib import Path

    parser = argparse.ArgumentParser(prog="python -m fd_cuda.kernels.tune", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("products", nargs="+", help="[norm+]plain|add|gated:NxK")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    options = parser.parse_args(arguments)
    table: dict[str, dict[str, str]] = {}
    if options.output.exists():
        table = json.loads(options.output.read_text("utf-8"))
    for text in options.products:
        kind, _, shape = text.partition(":")
        width, depth = (int(part) for part in shape.split("x"))
        product = Product(
            kind.removeprefix("norm+"), kind.startswith("norm+"), width, depth, options.dtype
        )
        plans = measure(product)
        table[product.key] = {str(size): str(plan) for size, plan in plans.items()}
        options.output.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
