"""FastDeploy beside llama.cpp, OpenVINO GenAI and transformers on one CPU: same models, same
threads.

    python plugins/fd-cpu/benchmarks/against_llama_cpp.py --rounds 0     # builds, writes models
    python plugins/fd-cpu/benchmarks/against_llama_cpp.py --main --minutes 5
    python plugins/fd-cpu/benchmarks/against_llama_cpp.py --models qwen3-0.6b --formats int4 \\
        --tokens 32

--main is the main table of docs/performance-cpu.md: both engines, ERNIE-4.5-0.3B, weights of the
same number of bits and of four in the same groups of 32, all engines started at once.
Random weights of real sizes, and the demo model. llama.cpp is built from source into --work-dir
(needs cmake, a C++ compiler and the Python package gguf), where models are written too: 6 GB for
both. Each round measures every engine once, one after another, in an order that rotates; figures
are medians over rounds of tokens per second, ratios are of medians. Other engines than llama.cpp
are started once and wait for their turns. The floor is the time to read the GGUF file's bytes once
per token, at the rate at which this machine's threads read that many.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import llama_programs
import random_models
from waiting_engine import WaitingEngine

POINTS: Final[dict[str, tuple[int, int]]] = {
    "decode 1": (1, 0),
    "decode 8": (8, 0),
    "decode 32": (32, 0),
    "prefill 512": (1, 512),
    "prefill 2048": (1, 2048),
}
FORMATS: Final = {"int4": "q4_0", "int8": "q8_0", "bf16": "bf16"}
# How our engine is asked for the same number of bits; "file" reads llama.cpp's own file.
OURS: Final[dict[str, dict[str, str]]] = {
    "int4": {
        "wint4 g32": '{"quantization": "wint4", "group_size": 32, "lm_head": true}',
        "w4a8": '{"quantization": "w4a8", "lm_head": true}',
        "file": "",
    },
    "int8": {"w8a8": '{"quantization": "w8a8", "lm_head": true}', "file": ""},
    "bf16": {"bf16": ""},
}
KV_BYTES: Final = 2 << 30
MAIN: Final[dict[str, Any]] = {
    "models": ["ernie-4.5-0.3b"],
    "engines": ["fastdeploy", "llama.cpp"],
    "devices": ["x86"],
    "modes": ["wint4 g32", "w8a8", "bf16"],
    "tokens": 16,
    "at_once": True,
}


@dataclass
class Engine:
    """One row: what runs, and what it has shown so far."""

    label: str
    kind: str
    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, list[float]] = field(default_factory=dict)
    problem: str = ""
    child: WaitingEngine | None = None

    def median(self, point: str) -> float | None:
        values = self.seen.get(point)
        return statistics.median(values) if values else None


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--main", action="store_true", help="see above; other options still count")
    parser.add_argument("--rounds", type=int, default=3, help="0: only write models and weights")
    parser.add_argument(
        "--minutes",
        type=float,
        default=0,
        help="instead: rounds as long as one more fits in, and one at least",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=128, help="tokens decoded per sequence")
    parser.add_argument("--models", nargs="+", default=list(random_models.NAMES), metavar="NAME")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--points", nargs="+", default=list(POINTS), choices=list(POINTS))
    parser.add_argument("--devices", nargs="+", default=["x86", "cpu"], help="of ours")
    modes = sorted({mode for modes in OURS.values() for mode in modes})
    parser.add_argument("--modes", nargs="+", default=modes, choices=modes, help="of ours")
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["fastdeploy", "llama.cpp", "openvino", "transformers"],
        choices=["fastdeploy", "llama.cpp", "openvino", "transformers"],
    )
    parser.add_argument("--openvino-python", default=sys.executable, help="one with openvino-genai")
    parser.add_argument(
        "--time-limit", type=float, default=900, help="seconds, of one engine's run"
    )
    parser.add_argument(
        "--work-dir", type=Path, default=Path("~/.cache/fastdeploy/against-llama-cpp").expanduser()
    )
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="start all engines of all tables before the first is measured: as much memory, less "
        "time",
    )
    parser.add_argument("--build-dir", type=Path, help="of llama.cpp; default: below --work-dir")
    parser.add_argument(
        "--keep-weights",
        action="store_true",
        help="packed, in --work-dir: fd-cpu starts sooner, from a file that lies in small pages",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers")
    if parser.parse_known_args()[0].main:
        parser.set_defaults(**MAIN)
    return parser.parse_args()


def engines(options: argparse.Namespace, model: str, bits: str, programs: Path) -> list[Engine]:
    """Everything that runs this model in this many bits."""
    folder = random_models.write_folder(model, options.work_dir / model)
    plain = random_models.write_gguf(model, options.work_dir / f"{model}-bf16.gguf")
    file = plain
    if bits != "bf16":
        tool = programs / "llama-quantize"
        file = random_models.quantized(plain, FORMATS[bits], tool, options.threads)
    found = []
    if "llama.cpp" in options.engines:
        found.append(Engine(f"llama.cpp {FORMATS[bits]}", "llama.cpp", file))
    if "fastdeploy" in options.engines:
        for device in options.devices:
            for name, quantization in OURS[bits].items():
                if name not in options.modes:
                    continue
                path = file if name == "file" else folder
                label = f"fastdeploy {device} {FORMATS[bits] + ' file' if name == 'file' else name}"
                settings = {"device": device, "quantization": quantization, "kv_bytes": KV_BYTES}
                cached = device == "x86" and options.keep_weights
                settings["weight_cache"] = str(options.work_dir / "weights") if cached else ""
                found.append(Engine(label, "fastdeploy", path, settings))
    if "openvino" in options.engines:
        found.append(Engine(f"OpenVINO GenAI {FORMATS[bits]}", "openvino", file))
    if "transformers" in options.engines and bits == "bf16":
        found.append(Engine("transformers bf16", "transformers", folder))
    return found


@contextmanager
def noting(engine: Engine) -> Iterator[None]:
    """An engine that failed once is not asked again."""
    try:
        yield
    except (subprocess.SubprocessError, OSError, RuntimeError) as error:
        text = getattr(error, "stderr", "") or str(error)
        last = text.strip().splitlines()[-1] if text.strip() else repr(error)
        engine.problem = last.removeprefix("fastdeploy_core.errors.")[:160]


def bytes_per_s(size: int, threads: int) -> float:
    """How fast the threads read `size` bytes together, again and again: the median of some
    passes."""
    share = size // threads
    buffers = [ctypes.create_string_buffer(share) for _ in range(threads)]
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes, memchr.restype = (
        [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t],
        ctypes.c_void_p,
    )
    seconds = []
    for _ in range(9):
        readers = [threading.Thread(target=memchr, args=(b, 1, share)) for b in buffers]
        started = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        seconds.append(time.perf_counter() - started)
    return share * threads / statistics.median(seconds)


@dataclass
class Table:
    """A model in so many bits: engines, and how often a second its file can be read."""

    model: str
    bits: str
    rows: list[Engine]
    options: argparse.Namespace
    programs: Path
    floors: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Processes of the engines that wait in one, all at the same time."""
        options = self.options
        asked = {
            "points": {name: POINTS[name] for name in options.points},
            "tokens": options.tokens,
            "threads": options.threads,
            "vocab_size": random_models.vocab_size(self.model),
        }
        for engine in self.rows:
            if engine.kind != "llama.cpp":
                python = options.openvino_python if engine.kind == "openvino" else sys.executable
                mine = {**asked, "model": str(engine.model), **engine.settings}
                engine.child = WaitingEngine(python, engine.kind, mine, options.time_limit)

    def round(self, number: int) -> None:
        """Every engine once."""
        print(f"{self.model} {self.bits}, round {number + 1}", file=sys.stderr, flush=True)
        size = (self.options.work_dir / f"{self.model}-{FORMATS[self.bits]}.gguf").stat().st_size
        self.floors.append(bytes_per_s(size, self.options.threads) / size)
        first = number % len(self.rows)
        for engine in self.rows[first:] + self.rows[:first]:
            if not engine.problem:
                with noting(engine):
                    self._measure(engine)

    def _measure(self, engine: Engine) -> None:
        points = {name: POINTS[name] for name in self.options.points}
        started = time.perf_counter()
        if engine.child is not None:
            found = engine.child.ask(points)
        else:
            threads, tokens = self.options.threads, self.options.tokens
            found = llama_programs.measure(self.programs, engine.model, points, threads, tokens)
        for name, value in found.items():
            engine.seen.setdefault(name, []).append(value)
        took, values = time.perf_counter() - started, (f"{value:.1f}" for value in found.values())
        print(f"  {engine.label}, {took:.0f} s: {' '.join(values)}", file=sys.stderr, flush=True)


def show(table: Table, points: list[str]) -> None:
    """The table, then every row in relation to llama.cpp's."""
    rows = table.rows
    width = max(len(row.label) for row in rows) + 2
    print(f"\n{table.model}, {table.bits}: tokens/s, medians")
    print(" " * width + "".join(f"{point:>14}" for point in points))
    for row in rows:
        if row.problem and not row.seen:
            print(f"{row.label:<{width}}not measured: {row.problem}")
            continue
        values = [row.median(point) for point in points]
        print(
            f"{row.label:<{width}}" + "".join(f"{v:>14.1f}" if v else f"{'-':>14}" for v in values)
        )
    if "decode 1" in points and table.floors:
        print(f"{'floor (bytes / bandwidth)':<{width}}{statistics.median(table.floors):>14.1f}")
    peer = next((row for row in rows if row.kind == "llama.cpp" and row.seen), None)
    if peer is None or not any(row.seen for row in rows if row is not peer):
        return
    print(f"in relation to {peer.label}:")
    for row in rows:
        if row is not peer and row.seen:
            ratios = [_ratio(row.median(point), peer.median(point)) for point in points]
            print(f"{row.label:<{width}}" + "".join(ratios))


def show_summary(tables: list[Table], points: list[str]) -> None:
    """A row for each of our engines, as docs/performance-cpu.md has them."""
    print("\n| times llama.cpp's, tokens/s | " + " | ".join(points) + " |")
    print("|---" * (len(points) + 1) + "|")
    for table in tables:
        peer = next((row for row in table.rows if row.kind == "llama.cpp" and row.seen), None)
        for row in table.rows:
            cells = [_cell(row.median(p), peer.median(p)) if peer else "" for p in points]
            if row is not peer and any(cells):
                print(f"| {table.model} {row.label} | " + " | ".join(cells) + " |")


def _cell(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f} ({ours:,.4g} of {theirs:,.4g})" if ours and theirs else ""


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:>13.2f}x" if ours and theirs else f"{'-':>14}"


def processor() -> str:
    """Name and what matters of its instruction sets."""
    text = Path("/proc/cpuinfo").read_text()
    name = next((x.split(":", 1)[1].strip() for x in text.splitlines() if "model name" in x), "?")
    flags = next(
        (x.split(":", 1)[1].split() for x in text.splitlines() if x.startswith("flags")), []
    )
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
    return f"{name}; {' '.join(flag for flag in known if flag in flags)}"


def rounds_of(options: argparse.Namespace, started: float) -> Iterator[int]:
    """Numbers of rounds: as many as asked for, or as are expected to end in time."""
    number, longest, began = 0, 0.0, time.monotonic()
    while (
        number < options.rounds
        if not options.minutes
        else (number == 0 or began + longest < started + 60 * options.minutes)
    ):
        yield number
        number += 1
        longest = max(longest, time.monotonic() - began)
        began = time.monotonic()


def main() -> None:
    """Build, write, run, print."""
    started = time.monotonic()
    options = parse_arguments()
    build_dir = options.build_dir or options.work_dir / "llama.cpp"
    programs = llama_programs.build(build_dir, options.threads)
    now = datetime.datetime.now(datetime.UTC)
    print(
        f"{now:%Y-%m-%d}; {processor()}; {options.threads} threads; Python "
        f"{platform.python_version()}"
    )
    print(f"llama.cpp: {llama_programs.version(programs)}")
    rounds = f"{options.minutes} minutes" if options.minutes else f"{options.rounds} rounds"
    print(f"{rounds}, {options.tokens} tokens decoded; load {os.getloadavg()[0]:.1f}")
    tables = [
        Table(model, bits, engines(options, model, bits, programs), options, programs)
        for model in options.models
        for bits in options.formats
    ]
    kept: dict[str, Any] = {}
    for group in [tables] if options.at_once else [[table] for table in tables]:
        for table in group:
            table.start()
        for engine in (engine for table in group for engine in table.rows):
            if engine.child is not None:
                with noting(engine):
                    engine.child.answer()
        for number in rounds_of(options, started):
            for table in group:
                table.round(number)
        for table in group:
            for engine in table.rows:
                if engine.child is not None:
                    engine.child.close()
            show(table, options.points)
            kept[f"{table.model} {table.bits}"] = {r.label: r.problem or r.seen for r in table.rows}
            if options.json:
                options.json.write_text(json.dumps(kept, indent=1))
    show_summary(tables, options.points)


if __name__ == "__main__":
    main()
