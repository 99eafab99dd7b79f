r"""Products with rounded activations after what makes their inputs in a model, whole chains in one
run.

    python plugins/fd-cuda/benchmarks/quantized_chains.py [--after norm|silu] [--rows 4096] \
        [--shapes 8192x8192] [--formats w8a8]

norm: sum with a residual, RMSNorm, product; silu: silu(gate) * up, product. Beside bf16's chain
(cuBLAS) stand the chain in which the norm or the activation rounds what it yields, as layers run
it, and the one whose rounding is a kernel of its own. Microseconds, medians of graph replays over
rotating weights, of runs that take turns; in brackets bf16's time over it, after the bar what
stands before the product alone: plain, and rounding. Both chains' results are compared bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from quantized import BY_ROWS, DENSE, DEVICE, DTYPE, guarded, how_many, in_turn_us, prepared

from fd_cuda.kernels import norm, quant_fused, quant_linear
from fd_cuda.kernels.quant_weights import Weights

EPS = 1e-5
Before = Callable[[Weights | None], Any]  # None: nothing rounds


def before(after: str, rows: int, depth: int) -> Before:
    """What makes the product's input, for a weight as it takes it."""
    if after == "silu":
        both = torch.randn(rows, 2 * depth, device=DEVICE).to(DTYPE)
        return lambda w: norm.silu_and_mul(both) if w is None else quant_fused.silu_and_mul(both, w)
    x, residual, scale = (torch.randn(n, depth, device=DEVICE).to(DTYPE) for n in (rows, rows, 1))

    def run(weight: Weights | None) -> Any:
        if weight is None:
            return norm.add_rms_norm(x, residual, scale[0], EPS)[0]
        return quant_fused.add_rms_norm(x, residual, scale[0], EPS, weight)[0]

    return run


def cell(kind: str, width: int, depth: int, make: Before) -> str:
    count = how_many(width * depth)
    plain = [torch.randn(width, depth, dtype=DTYPE, device=DEVICE) for _ in range(count)]
    packed = [prepared(kind, width, depth) for _ in range(count)]
    linear = quant_linear.linear
    runs = [
        lambda: [F.linear(make(None), weight) for weight in plain],
        lambda: [linear(make(weight), weight, None) for weight in packed],
        lambda: [linear(make(None), weight, None) for weight in packed],
        lambda: [make(None) for _ in packed],
        lambda: [make(weight) for weight in packed],
    ]
    for run in runs:
        run()
    bf16, fused, apart, alone, rounding = in_turn_us(runs, count)
    same = torch.equal(
        linear(make(packed[0]), packed[0], None), linear(make(None), packed[0], None)
    )
    text = (
        f"bf16 {bf16:.1f}, {fused:.1f} ({bf16 / fused:.2f}), "
        f"rounding apart {apart:.1f} ({bf16 / apart:.2f})"
    )
    return f"{text} | {alone:.1f}, {rounding:.1f}" + ("" if same else "; RESULTS DIFFER")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--after", choices=("norm", "silu"), default="norm")
    parser.add_argument("--rows", default="4096")
    parser.add_argument("--shapes", default=",".join(DENSE))
    parser.add_argument("--formats", default=",".join(BY_ROWS))
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}")
    with torch.inference_mode():
        warm = torch.randn(4096, 4096, dtype=DTYPE, device=DEVICE)
        for _ in range(300):  # the clocks have to come up first
            torch.mm(warm, warm)
        for shape in options.shapes.split(","):
            width, depth = (int(n) for n in shape.split("x"))
            for rows in map(int, options.rows.split(",")):
                print(f"\n{shape}, {rows} rows, after {options.after}", flush=True)
                make = before(options.after, rows, depth)
                for kind in options.formats.split(","):
                    guarded(f"  {kind}", partial(cell, kind, width, depth, make))
                    torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
