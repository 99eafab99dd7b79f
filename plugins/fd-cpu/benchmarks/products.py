"""Products of packed matrices alone: how near they are to what the processor and its memory can do.

    python plugins/fd-cpu/benchmarks/products.py [--threads 2] [--outputs 3072] [--inputs 1024] \\
        [--isa avx512]

Prints, for each format and number of rows, the median of several runs: milliseconds, operations and
bytes of weights per second. Shapes are those of ERNIE-4.5-0.3B's gate unless others are given.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from fd_cpu import _native

FORMATS = {
    "float32": (0, 0),
    "bfloat16": (1, 0),
    "bfloat16, coded": (5, 0),
    "int8": (2, 0),
    "int4": (3, 0),
    "int4, groups of 128": (3, 128),
    "int4, groups of 32": (3, 32),
    "tet2": (4, 0),
}
ROWS = (1, 4, 8, 16, 32, 512)


def seconds(runtime: object, matrix: object, rows: int, asked: argparse.Namespace) -> float:
    """Median of the runs."""
    x = np.random.default_rng(1).standard_normal((rows, asked.inputs)).astype(np.float32)
    y = np.empty((rows, asked.outputs), np.float32)
    taken = []
    for _ in range(asked.runs):
        began = time.perf_counter()
        runtime.linear(
            *(matrix, x.ctypes.data, 0, rows, asked.inputs, 0, 0.0, 0, 0),
            *(y.ctypes.data, 0, asked.outputs),
        )
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def packed(runtime: object, kind: int, group: int, asked: argparse.Namespace) -> object:
    """Random weights; of tet2 random words, which are a code of some weights."""
    rng, shape = np.random.default_rng(0), (asked.outputs, asked.inputs)
    if kind == FORMATS["bfloat16, coded"][0]:
        bits = (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return runtime.code_rows(*shape, bits.ctypes.data, shape[1], False)
    matrix = _native.make_packed(kind, *shape, group, False)
    if kind == FORMATS["tet2"][0]:
        strands = rng.integers(0, 1 << 32, (-(-shape[0] // 64), shape[1] // 8, 32), np.uint32)
        scales, signs = np.ones(shape[0], np.float32), np.ones(shape[1], np.int8)
        addresses = (array.ctypes.data for array in (strands, scales, signs))
        _native.set_tet(matrix, *addresses, shape[1] & -shape[1])
        return matrix
    weight = rng.standard_normal(shape).astype(np.float32)
    runtime.set_rows(matrix, shape[0], weight.ctypes.data, 0, shape[1])
    return matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--isa", default="")
    parser.add_argument("--runs", type=int, default=15)
    asked = parser.parse_args()
    runtime = _native.Runtime(asked.threads, [], asked.isa)
    print(
        f"{runtime.isa}, {asked.threads} threads, [{asked.outputs}, {asked.inputs}], median of "
        f"{asked.runs} runs"
    )
    print(f"{'format':>20} {'rows':>5} {'ms':>8} {'Gop/s':>8} {'GB/s':>8}")
    for name, (kind, group) in FORMATS.items():
        matrix = packed(runtime, kind, group, asked)
        for rows in ROWS:
            took = seconds(runtime, matrix, rows, asked)
            work = 2 * asked.outputs * asked.inputs * rows / took / 1e9
            read = matrix.num_bytes / took / 1e9
            print(f"{name:>20} {rows:>5} {took * 1e3:>8.3f} {work:>8.0f} {read:>8.1f}")


if __name__ == "__main__":
    main()
