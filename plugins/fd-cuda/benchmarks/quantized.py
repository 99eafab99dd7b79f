"""Products with packed weights, experts and quantized caches on one GPU, beside bf16 and the bytes
that must move.

    python plugins/fd-cuda/benchmarks/quantized.py dense [--rows 1,8] [--shapes 8192x8192] \\
        [--formats wint4] [--unpacked]
    python plugins/fd-cuda/benchmarks/quantized.py experts [--rows 4096] [--unpacked]
    python plugins/fd-cuda/benchmarks/quantized.py cache

Every figure is a median of graph replays over rotating weights, so that the card's cache does not
help; rounding of activations is included and also shown by itself. Floor: bytes of weights over
4.30 TB/s, or operations over 790 TFLOP/s (1580 with rounded activations), whichever takes longer.
"error" compares with the same weights dequantized in float32. --unpacked: beside it the same layer
whose weights are unpacked to half floats for the call and multiplied as such, by cuBLAS, with tet2
after the rotation of the activations, or as bf16 experts (tet2: without the rotations).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fastdeploy_core.contracts.kv_formats import KV_FORMATS
from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight
from timing import time_s

from fd_cuda.kernels import experts, quant_experts, quant_linear, quant_trellis, quant_weights
from fd_cuda.kernels.quant_native import unpack
from fd_cuda.kernels.quant_weights import Weights
from fd_cuda.kernels.trellis_native import Trellis, decoded, rotate, rotated

BYTES_S, FLOPS_S, FLOPS_8BIT_S = 4.30e12, 790e12, 1580e12
DENSE = ("8192x8192", "8192x3584", "6144x1024", "1024x3072")
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 4096)
# Format and group size.
KINDS = ("wint8", "wint4", "wint4/128", "w8a8", "w4a8", "wfp8afp8", "block_fp8", "ccq2", "tet2")
EXPERTS = {
    "64 top 6, 2560 x 1536": (64, 6, 2560, 1536),
    "64 top 8, 8192 x 3584": (64, 8, 8192, 3584),
    "512 top 10, 2048 x 512": (512, 10, 2048, 512),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 4096)
LARGE_KINDS = ("wint4", "tet2")  # of experts that fill gigabytes
BY_ROWS = ("w8a8", "wfp8afp8", "block_fp8")  # whose numbers no kernel unpacks
DTYPE, DEVICE = torch.bfloat16, "cuda"


def bits(kind: str) -> int:
    return {"wint4": 4, "w4a8": 4, "ccq2": 2, "tet2": 2, "bf16": 16}.get(kind.partition("/")[0], 8)


def floor_us(kind: str, weights: int, products: float) -> float:
    """Of so many weights read once and multiply-adds done."""
    rounds = kind.partition("/")[0] not in ("bf16", "wint8", "wint4", "ccq2", "tet2")
    work = 2 * products / (FLOPS_8BIT_S if rounds else FLOPS_S)
    return max(weights * bits(kind) / 8 / BYTES_S, work) * 1e6


def rounded(kind: str, *shape: int) -> torch.Tensor:
    """Normally distributed numbers as the format has them, the largest at four deviations. Random
    bits, which are never alike, would draw more power than bf16's numbers, and at many rows power
    decides."""
    x = torch.randn(shape, dtype=DTYPE, device=DEVICE).div_(4).clamp_(-1, 1)
    if "fp8" in kind:
        return (x * 448).to(torch.float8_e4m3fn)
    if bits(kind) == 8:
        return (x * 127).round_().to(torch.int8)
    both = (x * 7).round_().add_(8).to(torch.uint8)
    return both[..., ::2] | both[..., 1::2] << 4


def packed(kind: str, rows: int, count: int, num_experts: int = 0) -> PackedWeight:
    """Random numbers and scales; codes of 2 bits are any."""
    name, _, group = kind.partition("/")
    lead = (num_experts,) if num_experts else ()
    at = {"device": DEVICE}
    if name == "tet2":
        limits = (-(2**31), 2**31 - 1)
        held = {
            "weight": torch.randint(
                *limits, (*lead, rows // 64, count // 8, 32), dtype=torch.int32, **at
            ),
            "scale": (torch.rand(*lead, rows, **at) * 0.02 + 0.01).half(),
            "signs": torch.ones((*lead, count), dtype=torch.int8, **at),
            "block": torch.full((*lead, 1), count & -count, dtype=torch.int32, **at),
        }
        from fd_quant_wint2.formats import TET

        return PackedWeight(TET[2], rows, count, held, num_experts)
    if name == "ccq2":
        byte = partial(torch.randint, dtype=torch.uint8, **at)
        held = {
            "weight": byte(0, 256, (*lead, count // 4, rows)),
            "scale": byte(1, 256, (*lead, count // 128, rows)),
            "super_scale": torch.rand(*lead, rows, **at) * 1e-4 + 1e-4,
            "code_scale": torch.rand(*lead, rows, **at) * 4 + 118,
            "code_zero": torch.rand(*lead, rows, **at) * 540 - 60,
        }
        from fd_quant_wint2.formats import CCQ

        return PackedWeight(CCQ, rows, count, held, num_experts)
    weight = rounded(kind, *lead, rows, count)
    shape = (rows, count // int(group) if group else 1)
    shape = (-(-rows // 128), -(-count // 128)) if name == "block_fp8" else shape
    scale = torch.rand(*lead, *shape, **at) * 1e-3 + 1e-4
    held = {"weight": weight, "scale": scale}
    return PackedWeight(FORMATS[name], rows, count, held, num_experts, int(group or 0))


def prepared(kind: str, *shape: int) -> Weights | Trellis:
    room = quant_trellis if kind == "tet2" else quant_weights
    return room.prepare(packed(kind, *shape))


def how_many(size: int) -> int:
    """Weights that the second-level cache does not hold."""
    return max(2, min(24, (200 << 20) // size + 1))


def bf16_us(rows: int, width: int, depth: int) -> float:
    count = how_many(2 * width * depth)
    weights = [torch.randn(width, depth, dtype=DTYPE, device=DEVICE) for _ in range(count)]
    x = torch.randn(rows, depth, device=DEVICE).to(DTYPE)
    return time_s(lambda: [F.linear(x, weight) for weight in weights], count) * 1e6


def in_turn_us(runs: list[Callable[[], Any]], count: int) -> list[float]:
    """Of each; several take turns, so that they find the card equally warm."""
    rounds = 1 if len(runs) == 1 else 3
    times = [[time_s(run, count) * 1e6 for run in runs] for _ in range(rounds)]
    return [statistics.median(own) for own in zip(*times, strict=True)]


def dense_cell(kind: str, rows: int, width: int, depth: int, also_unpacked: bool) -> str:
    count = how_many(width * depth * bits(kind) // 8)
    first = prepared(kind, width, depth)
    weights = [first, *(prepared(kind, width, depth) for _ in range(count - 1))]
    x = torch.randn(rows, depth, device=DEVICE).to(DTYPE)
    product = quant_trellis.linear if isinstance(first, Trellis) else quant_linear.linear
    runs = [lambda: [product(x, weight, None) for weight in weights]]
    if also_unpacked and kind not in BY_ROWS:
        runs.append(lambda: [unpacked_product(x, weight) for weight in weights])
    taken, *apart = in_turn_us(runs, count)
    share = floor_us(kind, width * depth, rows * width * depth) / taken
    text = f"{taken:.1f} us, {100 * share:.0f} % of floor"
    if apart:
        text += f" [unpacked, then cuBLAS: {apart[0]:.1f} us]"
    own_rounding = (
        partial(rotate, x, first) if isinstance(first, Trellis) else partial(first.round, x)
    )
    if isinstance(first, Trellis) or first.rounding:
        text += f" (rounding {time_s(lambda: [own_rounding() for _ in range(8)], 8) * 1e6:.1f})"
    if isinstance(first, Trellis):
        return text
    seen, scales = first.round(x)
    wide = seen.float() if scales is None else seen.float() * scales[:, None]
    expected = wide @ quant_weights.dequantized(first.slabs, torch.float32).T
    error = (product(x, first, None).float() - expected).norm() / expected.norm()
    shape = quant_linear.choose(first.slabs, rows, rounds=bool(first.rounding))
    return f"{text}, error {float(error):.1e}, {shape or 'library'}"


def compile_ahead(shapes: list[str], rows: list[int], kinds: list[str]) -> None:
    """Kernels of all cells, on all processors."""
    calls = []
    for shape in shapes:
        width, depth = (int(n) for n in shape.split("x"))
        for kind in kinds:
            weight = prepared(kind, width, depth)
            product = quant_trellis.linear if kind == "tet2" else quant_linear.linear
            for count in rows:
                x = torch.randn(count, depth, device=DEVICE).to(DTYPE)
                calls.append(partial(product, x, weight, None))

    def once(call: Callable[[], Any]) -> None:
        with torch.inference_mode(), contextlib.suppress(Exception):  # the cell itself will tell
            call()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(once, calls))


def dense(shapes: list[str], rows: list[int], kinds: list[str], also_unpacked: bool) -> None:
    compile_ahead(shapes, rows, kinds)
    for shape in shapes:
        width, depth = (int(n) for n in shape.split("x"))
        for count in rows:
            base = bf16_us(count, width, depth)
            floor = floor_us("bf16", width * depth, count * width * depth)
            print(
                f"\n{shape}, {count} rows: bf16 cuBLAS {base:.1f} us, floor {floor:.1f}", flush=True
            )
            for kind in kinds:
                cell = partial(dense_cell, kind, count, width, depth, also_unpacked)
                guarded(f"  {kind}", cell)
            torch.cuda.empty_cache()


def guarded(label: str, run: Callable[[], str]) -> None:
    """A cell that fails must not end the table."""
    try:
        print(f"{label}: {run()}", flush=True)
    except Exception as error:
        print(f"{label}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def unpacked(weight: Weights | Trellis) -> torch.Tensor:
    """All experts in half floats, by the kernel that unpacks fastest."""
    if isinstance(weight, Trellis):
        return decoded(weight, DTYPE)
    if weight.slabs is None:
        raise TypeError("a weight is not laid out for the kernels")
    return unpack(weight.slabs, DTYPE)


def unpacked_product(x: torch.Tensor, weight: Weights | Trellis) -> torch.Tensor:
    """By cuBLAS; weights of the trellis code are unpacked as rotated inputs see them."""
    seen = rotated(x, weight) if isinstance(weight, Trellis) else x
    return F.linear(seen, unpacked(weight))


def experts_cell(
    kind: str, size: tuple[int, int, int, int], tokens: list[int], also_unpacked: bool
) -> str:
    count, top_k, hidden, inner = size
    layers: list[tuple[Any, Any]] = []
    for _ in range(2):
        if kind == "bf16":
            gate_up = torch.randn(count, 2 * inner, hidden, device=DEVICE, dtype=DTYPE).mul_(0.02)
            down = torch.randn(count, hidden, inner, device=DEVICE, dtype=DTYPE).mul_(0.02)
            layers.append((gate_up, down))
        else:
            shapes = ((2 * inner, hidden, count), (hidden, inner, count))
            layers.append(tuple(prepared(kind, *shape) for shape in shapes))
    run = {"bf16": experts.moe_experts, "tet2": quant_trellis.moe_experts}.get(
        kind, quant_experts.moe_experts
    )
    cells = []
    for number in tokens:
        x = torch.randn(number, hidden, device=DEVICE).to(DTYPE)
        ids = torch.rand(number, count, device=DEVICE).topk(top_k, -1)[1]
        shares = torch.softmax(torch.rand(number, top_k, device=DEVICE), -1)
        taken = time_s(lambda x=x, i=ids, s=shares: [run(x, i, s, *pair) for pair in layers], 2)
        used = len(torch.unique(ids))
        each = 3 * hidden * inner
        floor = floor_us(kind, used * each, number * top_k * each)
        cell = f"{number}: {taken * 1e6:.0f} ({floor:.0f})"
        if also_unpacked and kind not in ("bf16", *BY_ROWS):

            def whole(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> None:
                for pair in layers:
                    experts.moe_experts(x, i, s, unpacked(pair[0]), unpacked(pair[1]))

            apart = time_s(lambda: [[unpacked(own) for own in pair] for pair in layers], 2)
            in_all = time_s(partial(whole, x, ids, shares), 2)
            cell += f" [unpacked {in_all * 1e6:.0f}, of which unpacking {apart * 1e6:.0f}]"
        cells.append(cell)
    return "; ".join(cells)


def moe(tokens: list[int], kinds: list[str], also_unpacked: bool) -> None:
    for name, size in EXPERTS.items():
        print(f"\nexperts {name}: tokens: us a layer (floor)", flush=True)
        large = size[2] > 4096
        for kind in ["bf16", *kinds]:
            if (large and kind not in LARGE_KINDS) or "/" in kind:
                continue
            own = [n for n in tokens if not large or n <= 1024]
            guarded(f"  {kind}", partial(experts_cell, kind, size, own, also_unpacked))
            torch.cuda.empty_cache()


def cache() -> None:
    """Decode attention over quantized caches, the cache write included."""
    import attention
    from fastdeploy_core.contracts.device import DeviceOptions

    from fd_cuda.attention.quantized import QuantizedAttention
    from fd_cuda.device import CudaDevice
    from fd_cuda.kernels import quant_cache

    class World(attention.World):
        def quantize(self, name: str, block_size: int) -> None:
            kind = KV_FORMATS[name]
            self.spec = replace(self.spec, kv_format=name)
            self.driver = QuantizedAttention(self.spec, block_size, self.device, None)
            self.write = getattr(quant_cache, kind.write)
            dtypes = [getattr(torch, kind.dtype)] * 2 + [torch.float16] * 2
            shapes = self.driver.cache_shapes(self.num_blocks)
            self.caches = [
                tuple(
                    torch.rand(shape, device=DEVICE).mul_(8).to(dtype)
                    for shape, dtype in zip(shapes, dtypes, strict=True)
                )
                for _ in self.caches
            ]

        def forward(self, own: tuple[torch.Tensor, ...], metadata: Any) -> torch.Tensor:
            if len(own) == 2:
                return super().forward(own, metadata)
            self.write((self.k, self.v), own, metadata.batch.slot_mapping, None)
            return self.driver.forward(self.q, self.k, self.v, own, metadata)

    device = CudaDevice(DeviceOptions(tensor_library="torch"))
    for name, spec in attention.LAYERS.items():
        if spec.num_kv_heads == 2 or spec.head_dim != 128:
            continue
        print(
            f"\ndecode attention, {name}, us a layer (bytes of keys and values over 4.30 TB/s)",
            flush=True,
        )
        for batch, length in ((1, 8192), (8, 1024), (64, 1024), (32, 8192)):
            rows = [(1, length)] * batch
            cells = []
            for kind in ("bfloat16", *KV_FORMATS):
                world = World(device, spec, rows, 64, attention.num_caches(rows, spec))
                size = world.kv_bytes()
                if kind in KV_FORMATS:
                    world.quantize(kind, 64)
                    size //= 2 * KV_FORMATS[kind].per_byte
                taken = world.graph_us(world.driver.prepare(world.batch()))
                cells.append(f"{kind} {taken:.1f} ({size / BYTES_S * 1e6:.1f})")
                del world
            print(f"  {batch} x {length}: " + "; ".join(cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=("dense", "experts", "cache"))
    parser.add_argument("--rows", help="of dense products, or tokens of experts")
    parser.add_argument("--shapes", default=",".join(DENSE))
    parser.add_argument("--formats", default=",".join(KINDS))
    parser.add_argument("--unpacked", action="store_true", help="also unpacked for the call")
    options = parser.parse_args()
    kinds = options.formats.split(",")
    rows = [int(n) for n in options.rows.split(",")] if options.rows else []
    with torch.inference_mode():
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}")
        warm = torch.randn(4096, 4096, dtype=DTYPE, device=DEVICE)
        for _ in range(300):  # the clocks have to come up first
            torch.mm(warm, warm)
        if "dense" in options.what:
            dense(options.shapes.split(","), rows or list(ROWS), kinds, options.unpacked)
        if "experts" in options.what:
            moe(rows or list(TOKENS), kinds, options.unpacked)
        if "cache" in options.what:
            cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
