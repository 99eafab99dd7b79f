"""`fastdeploy plugins report DEVICE`: what a device does here, in one file to send to others.

Each part is the command that anybody would run (`plugins doctor`, `why kernels`, `check`, and with
--model a generation), in a process of its own, so that a crash of the chip is a line of the report.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fastdeploy_core import __version__
from fastdeploy_core.contracts.base import CONTRACT, DISTRIBUTION
from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.plugins.discovery import Inventory, PluginEntry, discover
from fastdeploy_core.plugins.drivers import find
from fastdeploy_core.plugins.known import providers

from .collect_env import collect

FORMAT: Final = 1  # of the file; docs/devices_page.py reads it
CHECK: Final = "plugins.check"  # a command of another distribution
LIMIT_S: Final = 7200.0
MAX_WORDS: Final = 300  # of a reason
GENERATE: Final = """
import json, sys, time
from fastdeploy import LLM, SamplingParams
path, device, library = sys.argv[1:]
with LLM(path, device=device, tensor_library=library, skip_tokenizer_init=True) as llm:
    def run(rows, tokens):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [3 + n] * 64} for n in range(rows)]
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started
    run(1, 4), run(8, 4)
    one, eight = run(1, 64), run(8, 64)
print(json.dumps({"tokens_per_s_alone": 64 / one, "tokens_per_s_of_eight": 512 / eight}))
"""


def main(argv: Sequence[str]) -> int:
    """Write the file; exit code 1 if a check of it failed."""
    arguments = _parser().parse_args(argv)
    inventory = discover()
    entry = _device(inventory, arguments.device)
    if not inventory.named("command", CHECK):
        raise ConfigError(
            f"a report needs the conformance kit; run: pip install {providers('command')[CHECK]}"
        )
    report = made(entry, arguments)
    path = Path(arguments.output or f"{entry.name}-{report['date']}.json")
    path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(f"wrote {path}: {summary(report)}")
    return 0 if is_good(report) else 1


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fastdeploy plugins report",
        description="Run doctor, the conformance kit and a generation on a device, and write what "
        "they found into a file for its plugin's authors. It names the machine's processor, system "
        "and packages; no paths, no settings, no host name.",
    )
    parser.add_argument("device", help="a device by name, or a distribution that has one")
    parser.add_argument("--tensor", default="", help="tensor library: torch or paddle")
    parser.add_argument("--model", default="", metavar="DIR", help="a model to be timed")
    parser.add_argument("-k", dest="keyword", default="", help="only these tests, as pytest")
    parser.add_argument("--note", default="", help="what chip it is, its driver, who sends it")
    parser.add_argument(
        "--output", default="", metavar="FILE", help="default: DEVICE-DATE.json in this folder"
    )
    return parser


def _device(inventory: Inventory, name: str) -> PluginEntry:
    own = [e for e in inventory.of("device") if e.distribution == name]
    return own[0] if len(own) == 1 else find("device", name, inventory)


def made(entry: PluginEntry, arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole report."""
    facts = collect({})
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": entry.name,
        "distribution": f"{entry.distribution} {entry.version}",
        "core": f"{DISTRIBUTION} {__version__}",
        "contract": ".".join(map(str, CONTRACT)),
        "note": arguments.note,
        "keyword": arguments.keyword,
        "machine": facts["machine"],
        "packages": {n: v for n, v in facts["packages"].items() if v != "not installed"},
        "doctor": _doctor(entry),
        "kernels": _kernels(entry),
        "kit": _kit(entry, arguments),
        "timings": _timings(entry, arguments) if arguments.model else {},
    }


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    """A command of `fastdeploy`, or Python's own with -c."""
    command = words if words[0] == "-c" else ("-m", "fastdeploy_core.cli.main", *words)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        return subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-P", *command], capture_output=True, text=True, timeout=LIMIT_S,
            env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"did not end within {LIMIT_S:g} s")


def _error(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"error": last[:MAX_WORDS]}


def _doctor(entry: PluginEntry) -> list[dict[str, str]] | dict[str, str]:
    done = _run("plugins", "doctor", "--json")
    try:
        rows = json.loads(done.stdout)["checks"]
    except ValueError:
        return _error(done)
    return [
        {key: row[key][:MAX_WORDS] for key in ("kind", "name", "verdict", "hint")}
        for row in rows
        if row["origin"] == entry.origin
    ]


def _kernels(entry: PluginEntry) -> dict[str, Any]:
    done = _run("plugins", "why", "kernels", "--device", entry.name, "--json")
    try:
        (decision,) = json.loads(done.stdout)["decisions"]
    except ValueError:
        return _error(done)
    rows = decision["candidates"]
    own = [r for r in rows if r["distribution"] != DISTRIBUTION]
    return {
        "used": {r["name"]: r["distribution"] for r in own if r["accepted"]},
        "not used": {r["name"]: r["reason"][:MAX_WORDS] for r in own if not r["accepted"]},
        "operations": len({r["name"] for r in rows}),
    }


def _kit(entry: PluginEntry, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fastdeploy-report-") as folder:
        path = Path(folder, "kit.json")
        words = ["plugins", "check", entry.name, "--kind", "device", "--report", str(path)]
        words += ["--tensor", arguments.tensor] if arguments.tensor else []
        words += ["-k", arguments.keyword] if arguments.keyword else []
        started = time.monotonic()
        done = _run(*words)
        if not path.exists():
            return _error(done)
        tests = json.loads(path.read_text("utf-8"))["tests"]
    outcomes: dict[str, Counter[str]] = {}
    for test in tests:
        outcomes.setdefault(test["suite"], Counter())[test["outcome"]] += 1
    return {
        "tensor library": arguments.tensor or "the device's own",
        "seconds": round(time.monotonic() - started, 1),
        "suites": {suite: dict(counts) for suite, counts in outcomes.items()},
        "failures": {
            test["test"]: test["reason"][:MAX_WORDS]
            for test in tests
            if test["outcome"] == "failed"
        },
    }


def _timings(entry: PluginEntry, arguments: argparse.Namespace) -> dict[str, Any]:
    path = str(Path(arguments.model).absolute())
    done = _run("-c", GENERATE, path, entry.name, arguments.tensor)
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return _error(done)
    return {"model": Path(path).name} | {k: round(v, 1) for k, v in found.items()}


def counts(report: dict[str, Any]) -> tuple[int, int]:
    """Tests of the kit that passed, and that failed."""
    suites = report["kit"].get("suites", {}).values()
    passed, failed = (sum(suite.get(o, 0) for suite in suites) for o in ("passed", "failed"))
    return passed, failed


def is_good(report: dict[str, Any]) -> bool:
    """Whether nothing failed, and something ran."""
    doctor, (passed, failed) = report["doctor"], counts(report)
    return (
        isinstance(doctor, list)
        and all(row["verdict"] != "FAIL" for row in doctor)
        and passed > 0
        and not failed
        and "error" not in report["timings"]
    )


def summary(report: dict[str, Any]) -> str:
    """One line."""
    doctor, (passed, failed) = report["doctor"], counts(report)
    wrong = sum(row["verdict"] == "FAIL" for row in doctor) if isinstance(doctor, list) else 1
    kernels = report["kernels"]
    words = [
        f"doctor {wrong} failed",
        f"kit {passed} passed, {failed} failed",
        f"{len(kernels.get('used', ()))} of {kernels.get('operations', 0)} operations from plugins",
    ]
    if speed := report["timings"].get("tokens_per_s_alone"):
        words.append(f"{speed} tokens/s alone")
    errors = [p["error"] for p in (report["kit"], kernels, report["timings"]) if "error" in p]
    return "; ".join([*words, *errors])
