"""`fastdeploy plugins shapes FILE`: times the operations that a server was seen to call, on a
device that is here: what to tune first, and whether it helped."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.plugins.drivers import lookup
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.plugins.report import table

from .shapes import Argument, Call, Other, Plain, Routing, Several, TensorShape, read

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend

TIMES = 5  # of each call; the median counts


def main(argv: Sequence[str]) -> int:
    """Replay and print, the operations that take most time first."""
    parser = CommandParser(
        prog="fastdeploy plugins shapes",
        description="Time the operations that a server was seen to call (--capture-shapes).",
    )
    parser.add_argument("file", type=Path, help="what `serve --capture-shapes FILE` wrote")
    parser.add_argument("--device", default="cpu", help="device to run on")
    parser.add_argument("--tensor-library", default="", help="torch or paddle")
    parser.add_argument("--operation", default="", help="this operation alone")
    parser.add_argument("--top", type=int, default=20, help="rows to print")
    arguments = parser.parse_args(argv)
    calls = [c for c in read(arguments.file) if arguments.operation in ("", c.operation)]
    rows, skipped = replay(calls, arguments)
    total = sum(row[-1] for row in rows) or 1.0
    rows.sort(key=lambda row: -row[-1])
    shown = [
        (name, shapes, origin, count, f"{1e6 * each:.1f}", f"{100 * whole / total:.1f}")
        for name, shapes, origin, count, each, whole in rows[: arguments.top]
    ]
    print(table(("operation", "arguments", "from", "calls", "us each", "% of all"), shown))
    print(f"{len(rows)} kinds of calls, {total:.3f} s in all on device {arguments.device}")
    for reason in skipped:
        print(f"not replayed: {reason}")
    return 0


Timed = tuple[str, str, str, int, float, float]


def replay(calls: Sequence[Call], asked: argparse.Namespace) -> tuple[list[Timed], list[str]]:
    """(operation, arguments, distribution, calls, seconds of one, of all), and what could not be
    run, with the reason."""
    options = DeviceOptions(tensor_library=asked.tensor_library, num_threads=0, seed=0)
    device = lookup("device", asked.device)(options)
    kernels = build_kernel_table(device.name)
    rows: list[Timed] = []
    skipped: list[str] = []
    with device.xp.no_grad():
        for call in calls:
            shown = ", ".join(map(_shown, call.arguments))
            if others := [x.kind for x in call.arguments if isinstance(x, Other)]:
                skipped.append(f"{call.operation}({shown}): {', '.join(others)} cannot be made")
                continue
            try:
                function = kernels[call.operation]
                given = [_made(device, x, seed) for seed, x in enumerate(call.arguments)]
                each = _seconds(device, functools.partial(function, *given))
            except Exception as error:
                skipped.append(f"{call.operation}({shown}): {type(error).__name__}: {error}")
                continue
            origin = kernels.origins()[call.operation]
            rows.append((call.operation, shown, origin, call.calls, each, each * call.calls))
    device.close()
    return rows, skipped


def _seconds(device: DeviceBackend, run: Callable[[], object]) -> float:
    taken = []
    for _ in range(1 + TIMES):  # the first one warms up
        began = time.perf_counter()
        run()
        event = device.record_event()
        while not event.query():
            pass
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _made(device: DeviceBackend, argument: Argument, seed: int) -> Any:
    """An argument of that kind. Integers are 0: a place that every table and cache has."""
    if isinstance(argument, Plain):
        return argument.value
    if isinstance(argument, Routing):
        return argument.spec
    if isinstance(argument, Several):
        return tuple(_made(device, part, seed) for part in argument.parts)
    if not isinstance(argument, TensorShape):
        raise TypeError(f"{argument} cannot be made")
    if argument.dtype in ("float32", "float16", "bfloat16"):
        values = np.random.default_rng(seed).standard_normal(argument.shape).astype("float32")
    else:
        values = np.zeros(argument.shape, "int64")
    return device.to_device(values).to(device.xp.dtype(argument.dtype))


def _shown(argument: Argument) -> str:
    if isinstance(argument, TensorShape):
        return "x".join(map(str, argument.shape)) + f" {argument.dtype}"
    if isinstance(argument, Several):
        return f"({', '.join(map(_shown, argument.parts))})"
    if isinstance(argument, Routing):
        return f"{argument.spec.top_k} of {argument.spec.num_experts} experts"
    return argument.kind if isinstance(argument, Other) else str(argument.value)
