"""FastDeploy beside llama.cpp, OpenVINO GenAI and transformers on one CPU: same models, same threads.

    python plugins/fd-cpu/benchmarks/against_llama_cpp.py --rounds 5
    python plugins/fd-cpu/benchmarks/against_llama_cpp.py --models qwen3-0.6b --formats int4 --tokens 32

Random weights of real sizes, and the demo model. llama.cpp is built from source into --work-dir (needs cmake, a C++ compiler
and the Python package gguf), where models are written too: 6 GB for both. Each round runs every engine
once, one after another, in an order that rotates; figures are medians over rounds of tokens per second,
ratios are of medians. The floor is the time to read the GGUF file's bytes once per token, at the rate at which
this machine's threads read that many.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import llama_programs
import random_models

HERE: Final = Path(__file__).resolve().parent
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
        "w4a8": '{"quantization": "w4a8", "lm_head": true}',
        "wint4 g32": '{"quantization": "wint4", "group_size": 32, "lm_head": true}',
        "file": "",
    },
    "int8": {"w8a8": '{"quantization": "w8a8", "lm_head": true}', "file": ""},
    "bf16": {"bf16": ""},
}
KV_BYTES: Final = 2 << 30


@dataclass
class Engine:
    """One row: what runs, and what it has shown so far."""

    label: str
    kind: str
    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, list[float]] = field(default_factory=dict)
    problem: str = ""

    def median(self, point: str) -> float | None:
        values = self.seen.get(point)
        return statistics.median(values) if values else None


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
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
    parser.add_argument("--build-dir", type=Path, help="of llama.cpp; default: below --work-dir")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers")
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
                found.append(Engine(label, "fastdeploy", path, settings))
    if "openvino" in options.engines:
        found.append(Engine(f"OpenVINO GenAI {FORMATS[bits]}", "openvino", file))
    if "transformers" in options.engines and bits == "bf16":
        found.append(Engine("transformers bf16", "transformers", folder))
    return found


def run(engine: Engine, options: argparse.Namespace, vocab_size: int, programs: Path) -> None:
    """One round of one engine; an engine that failed once is not asked again."""
    if engine.problem:
        return
    points = {name: POINTS[name] for name in options.points}
    started = time.perf_counter()
    try:
        if engine.kind == "llama.cpp":
            tokens = options.tokens
            found = llama_programs.measure(programs, engine.model, points, options.threads, tokens)
        else:
            found = _child(engine, options, vocab_size, points)
    except subprocess.TimeoutExpired:
        engine.problem = f"not done within {options.time_limit:g} s"
        return
    except (subprocess.CalledProcessError, RuntimeError) as error:
        text = getattr(error, "stderr", "") or str(error)
        last = text.strip().splitlines()[-1] if text.strip() else repr(error)
        engine.problem = last.removeprefix("fastdeploy_core.errors.")[:160]
        return
    for name, value in found.items():
        engine.seen.setdefault(name, []).append(value)
    took = time.perf_counter() - started
    print(f"  {engine.label}: {took:.0f} s", file=sys.stderr, flush=True)


def _child(
    engine: Engine, options: argparse.Namespace, vocab_size: int, points: dict[str, tuple[int, int]]
) -> dict[str, float]:
    asked = {
        "model": str(engine.model),
        "points": points,
        "tokens": options.tokens,
        "threads": options.threads,
        "vocab_size": vocab_size,
        **engine.settings,
    }
    python = options.openvino_python if engine.kind == "openvino" else sys.executable
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(
        [python, str(HERE / "engine_child.py"), engine.kind, json.dumps(asked)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=options.time_limit,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]
    return found


def bytes_per_s(size: int, threads: int) -> float:
    """How fast the threads read `size` bytes together, again and again: the median of some passes."""
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


def show(title: str, rows: list[Engine], floor: float, points: list[str]) -> None:
    """The table, then every row in relation to llama.cpp's."""
    width = max(len(row.label) for row in rows) + 2
    print(f"\n{title}: tokens/s, medians")
    print(" " * width + "".join(f"{point:>14}" for point in points))
    for row in rows:
        if row.problem and not row.seen:
            print(f"{row.label:<{width}}not measured: {row.problem}")
            continue
        values = [row.median(point) for point in points]
        print(
            f"{row.label:<{width}}" + "".join(f"{v:>14.1f}" if v else f"{'-':>14}" for v in values)
        )
    if "decode 1" in points:
        print(f"{'floor (bytes / bandwidth)':<{width}}{floor:>14.1f}")
    peer = next((row for row in rows if row.kind == "llama.cpp" and row.seen), None)
    if peer is None or not any(row.seen for row in rows if row is not peer):
        return
    print(f"in relation to {peer.label}:")
    for row in rows:
        if row is not peer and row.seen:
            ratios = [_ratio(row.median(point), peer.median(point)) for point in points]
            print(f"{row.label:<{width}}" + "".join(ratios))


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


def main() -> None:
    """Build, write, run, print."""
    options = parse_arguments()
    build_dir = options.build_dir or options.work_dir / "llama.cpp"
    programs = llama_programs.build(build_dir, options.threads)
    now = datetime.datetime.now(datetime.UTC)
    print(
        f"{now:%Y-%m-%d}; {processor()}; {options.threads} threads; Python {platform.python_version()}"
    )
    print(f"llama.cpp: {llama_programs.version(programs)}")
    print(
        f"{options.rounds} rounds, {options.tokens} tokens decoded; load {os.getloadavg()[0]:.1f}"
    )
    kept: dict[str, Any] = {}
    for model in options.models:
        vocab_size = random_models.vocab_size(model)
        for bits in options.formats:
            rows = engines(options, model, bits, programs)
            print(f"{model} {bits}", file=sys.stderr, flush=True)
            for number in range(options.rounds):
                for engine in rows[number % len(rows) :] + rows[: number % len(rows)]:
                    run(engine, options, vocab_size, programs)
            size = (options.work_dir / f"{model}-{FORMATS[bits]}.gguf").stat().st_size
            floor = bytes_per_s(size, options.threads) / size
            show(f"{model}, {bits}", rows, floor, options.points)
            kept[f"{model} {bits}"] = {row.label: row.problem or row.seen for row in rows}
            if options.json:
                options.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
