"""llama.cpp built from the source inside the llama-cpp-python package, and its two benchmarks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

TARGETS: Final = ("llama-bench", "llama-batched-bench", "llama-quantize")
FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",  # every instruction set of this machine
    f"-DCMAKE_CXX_FLAGS=-include {Path(__file__).parent / 'whole_tile_config.h'}",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)


def build(folder: Path, jobs: int) -> Path:
    """The folder of the programs; downloads and builds what is not there yet (some minutes)."""
    programs = folder / "build" / "bin"
    if all((programs / name).is_file() for name in TARGETS):
        return programs
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    if not sources:
        _say(f"downloading the source of llama-cpp-python into {folder}")
        # Only this package as source: what it needs to be unpacked may be built already.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--no-binary", "llama-cpp-python"]
        subprocess.run([*pip, "--dest", str(folder), "llama-cpp-python"], check=True)
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        sources = sorted(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    _say(f"building {', '.join(TARGETS)} with {' '.join(FLAGS)}")
    where = ["-S", str(sources[-1]), "-B", str(folder / "build")]
    log = folder / "build.log"
    with log.open("w") as output:
        for command in (
            ["cmake", *where, *FLAGS],
            ["cmake", "--build", str(folder / "build"), "-j", str(jobs), "--target", *TARGETS],
        ):
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed; see {log}")
    return programs


def version(programs: Path) -> str:
    """What the program says of itself, and the release of llama-cpp-python that its source came
    with."""
    done = subprocess.run(
        [str(programs / "llama-bench"), "--version"], capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).splitlines()
    said = [line for line in lines if line.startswith(("version", "built with"))]
    sources = sorted(programs.parents[1].glob("llama_cpp_python-*/"))
    said.append(f"source of {sources[-1].name}" if sources else "source unknown")
    return f"{', '.join(said)}; {_flags(programs.parent)}"


def _flags(build: Path) -> str:
    """What the programs were built with, of what decides on a CPU, as CMake noted it."""
    cache = build / "CMakeCache.txt"
    named = (
        "CMAKE_BUILD_TYPE|CMAKE_CXX_FLAGS|"
        "GGML_(?:NATIVE|CPU_REPACK|LLAMAFILE|OPENMP|FMA|F16C|AVX\\w*|AMX\\w*)"
    )
    pairs = re.findall(
        rf"^({named}):\w+=(.+)$", cache.read_text() if cache.is_file() else "", re.MULTILINE
    )
    return (
        " ".join(f"-D{name}={value}" for name, value in pairs if value != "OFF") or "flags unknown"
    )


def measure(
    programs: Path, model: Path, points: dict[str, tuple[int, int]], threads: int, tokens: int
) -> dict[str, float]:
    """Tokens per second at every point: (sequences, 0) decodes `tokens`, (1, n) reads a prompt of
    n."""
    batches = [batch for batch, prompt in points.values() if not prompt]
    prompts = [prompt for _, prompt in points.values() if prompt]
    found = _single(programs, model, prompts, threads, tokens if 1 in batches else 0)
    several = [batch for batch in batches if batch > 1]
    if several:
        found |= _batched(programs, model, several, threads, tokens)
    return {name: found[point] for name, point in points.items() if point in found}


def _single(
    programs: Path, model: Path, prompts: list[int], threads: int, tokens: int
) -> dict[tuple[int, int], float]:
    command = [str(programs / "llama-bench"), "-m", str(model), "-t", str(threads), "-o", "json"]
    command += ["-r", "1", "-p", ",".join(map(str, prompts or [0])), "-n", str(tokens)]
    done = _run(command)
    found = {}
    for row in json.loads(done.stdout):
        found[1, int(row["n_prompt"])] = float(row["avg_ts"])
    return found


def _batched(
    programs: Path, model: Path, batches: list[int], threads: int, tokens: int
) -> dict[tuple[int, int], float]:
    prompt = 16
    context = max(batches) * (prompt + tokens) + 256
    command = [str(programs / "llama-batched-bench"), "-m", str(model), "-c", str(context)]
    command += ["-t", str(threads), "-npp", str(prompt), "-ntg", str(tokens)]
    command += ["-npl", ",".join(map(str, batches)), "--output-format", "jsonl"]
    done = _run(command)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(int(row["pl"]), 0): float(row["speed_tg"]) for row in rows}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """What the program printed; a RuntimeError with how it ended and its last line if it failed."""
    _say(" ".join(command))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        code = done.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        said = done.stderr.strip().splitlines()[-20:]
        _say("\n".join(said))
        last = said[-1] if said else "it printed nothing"
        raise RuntimeError(f"{Path(command[0]).name}: {how}: {last}")
    return done


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
