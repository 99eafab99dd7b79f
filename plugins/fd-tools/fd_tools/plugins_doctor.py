"""`fastdeploy plugins doctor`: imports every plugin in a child process; time, verdict, hint."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy_core.contracts.base import DISTRIBUTION, KINDS
from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.contracts.device import DeviceQuestion
from fastdeploy_core.errors import ContractMismatch
from fastdeploy_core.plugins.discovery import DISABLED, HOOKS, OK, Inventory, PluginEntry, discover
from fastdeploy_core.plugins.drivers import check_contract
from fastdeploy_core.plugins.kernels import is_operation, misspelt
from fastdeploy_core.plugins.known import providers
from fastdeploy_core.plugins.manager import hook_manager
from fastdeploy_core.plugins.negotiate import ask_candidates
from fastdeploy_core.plugins.preflight import Job, Outcome
from fastdeploy_core.plugins.preflight import run as preflight
from fastdeploy_core.plugins.report import table
from fastdeploy_core.tensor import available

from .facts import REPORT
from .plugins_output import answer, asking_plugins

PASS, FAIL, WARN, SKIP = "PASS", "FAIL", "WARN", "SKIP"
DEVICE_LIMIT_S = 300.0
EXAMINE = "plugins.examine"  # a command of another distribution


def main(argv: Sequence[str]) -> int:
    """Print the rows; exit code 1 if any says FAIL."""
    arguments = _parser().parse_args(argv)
    with asking_plugins():
        rows = all_rows(arguments.timeout)
    failures = sum(r["verdict"] == FAIL for r in rows)
    if arguments.json:
        answer(json.dumps({"checks": rows}, indent=2))
    else:
        shown = [
            (
                r["name"],
                r["kind"],
                r["origin"],
                r["contract"],
                r["verdict"],
                f"{r['ms']:.0f} ms" if r["ms"] else "",
                r["hint"],
            )
            for r in rows
        ]
        columns = ("name", "kind", "distribution", "contract", "result", "time", "hint")
        answer(f"{table(columns, shown)}\n\n{len(rows)} checks, {failures} failed")
    return 1 if failures else 0


def all_rows(timeout_s: float) -> list[dict[str, Any]]:
    """Every row, in the order of the table."""
    inventory = discover()
    rows = plugin_rows(inventory, timeout_s) + device_rows(inventory)
    rows += library_rows() + pth_rows()
    return rows + [_plain_row("problem", WARN, problem) for problem in inventory.problems]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fastdeploy plugins doctor", description="Load each plugin in a child process."
    )
    parser.add_argument("--json", action="store_true", help="the stable form for programs")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds one import may take"
    )
    return parser


def plugin_rows(inventory: Inventory, timeout_s: float) -> list[dict[str, Any]]:
    """One row per entry, and the rows of its own checks."""
    rows = []
    loadable = [e for e in inventory.entries if e.status == OK]
    outcomes = preflight(
        [
            Job(
                e.target,
                timeout_s,
                ("fd_doctor_checks",) if e.kind == HOOKS else (),
                report=REPORT if e.kind == "kernels" else "",
                group=e.distribution,
            )
            for e in loadable
        ]
    )
    for entry in inventory.entries:
        if entry.status == OK:
            continue
        verdict = SKIP if entry.status == DISABLED else FAIL
        rows.append(_row(entry, verdict, hint=f"{entry.status}: {entry.reason}"))
    for entry, outcome in zip(loadable, outcomes, strict=True):
        rows.append(_outcome_row(entry, outcome))
        rows += [_row(entry, *problem) for problem in table_problems(outcome.facts)]
        for check in outcome.answers.get("fd_doctor_checks") or []:
            what, passed, hint = (*check, "", "", "")[:3]
            rows.append(
                _row(entry, PASS if passed else FAIL, hint=f"{what}: {hint}" if hint else str(what))
            )
    return rows


def table_problems(facts: Mapping[str, Any]) -> list[tuple[str, str, float, str]]:
    """(verdict, contract, milliseconds, hint) for each cell of a table that nobody can use."""
    found = [
        (FAIL, "", 0.0, f"{operation}: there is no module {module}")
        for operation, module in facts.get("missing modules", {}).items()
    ]
    own = []
    for name in facts.get("operations", ()):
        if near := misspelt(name):
            found.append((FAIL, "", 0.0, f"{name}: no layer asks for it; did you mean {near}?"))
        elif not is_operation(name):
            own.append(name)
    if own:
        words = "no operation of this core: only code that asks for it by name uses it"
        found.append((WARN, "", 0.0, f"{', '.join(own)}: {words}"))
    return found


def library_rows() -> list[dict[str, Any]]:
    """A model runs on a tensor library; device plugins bring one, the core brings none."""
    libraries = available()
    if libraries:
        return [_plain_row("tensor library", PASS, ", ".join(libraries))]
    hint = "none is installed, so that no model runs; run: pip install "
    return [_plain_row("tensor library", FAIL, f'{hint}"{DISTRIBUTION}[torch]" or "[paddle]"')]


def device_rows(inventory: Inventory) -> list[dict[str, Any]]:
    """What plugins did wrong when they were asked for devices, as every start asks; then what
    devices of plugins whose hardware is here really do, each in a process of its own."""
    hooks = hook_manager(inventory=inventory)
    decision, candidates = ask_candidates(
        hooks, inventory, "device", "fd_device_probe", DeviceQuestion()
    )
    libraries = {c.name: c.details.get("tensor_library", "") for c in candidates}
    rows = [_row(plugin, FAIL, hint=text) for plugin, text in hooks.faults]
    examiners = inventory.named("command", EXAMINE)
    for entry in inventory.of("device"):
        if entry.is_core or entry.name not in {c.name for c in decision.candidates if c.accepted}:
            continue
        if not examiners:
            hint = (
                f"its operations are not examined; run: pip install {providers('command')[EXAMINE]}"
            )
            rows.append(_row(entry, SKIP, hint=hint))
            continue
        started = time.perf_counter()
        module = examiners[0].target.partition(":")[0]
        for what, passed, words in _examine(module, entry.name, libraries.get(entry.name, "")):
            row = _row(entry, PASS if passed else FAIL, hint=f"{what}: {words}")
            row["ms"] = round((time.perf_counter() - started) * 1000, 1)
            rows.append(row)
    return rows


def _examine(module: str, name: str, library: str) -> list[tuple[str, bool, str]]:
    """The rows of `plugins examine`, whichever plugins this environment lets take part."""
    command = [sys.executable, "-P", "-m", module, name, "--json"]
    command += ["--tensor-library", library] if library else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter
            command, capture_output=True, text=True, timeout=DEVICE_LIMIT_S, env=environment,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [("device", False, f"did not answer within {DEVICE_LIMIT_S:g} s")]
    try:
        return [tuple(row) for row in json.loads(done.stdout.strip().splitlines()[-1])]
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [("device", False, last[:300])]


def pth_rows() -> list[dict[str, Any]]:
    """.pth files run code before any program starts; those that no distribution owns are shown."""
    folders = {*site.getsitepackages(), sysconfig.get_path("purelib"), site.getusersitepackages()}
    found = [p for f in sorted(folders) for p in sorted(Path(f).glob("*.pth"))]
    if not found:
        return []
    owned: set[str] = set()
    for distribution in importlib.metadata.distributions():
        record = distribution.read_text("RECORD") or ""
        if ".pth" in record:
            owned.update(line.partition(",")[0] for line in record.splitlines() if ".pth" in line)
    rows = []
    for path in found:
        if path.name in owned:
            continue
        runs_code = any(
            line.startswith(("import ", "import\t"))
            for line in path.read_text("utf-8", "replace").splitlines()
        )
        what = "runs code at every start of Python" if runs_code else "adds folders to sys.path"
        hint = f"{what}; remove {path} unless you know it"
        rows.append(_plain_row(".pth file", WARN, hint, path.name, "no distribution"))
    return rows


def _outcome_row(entry: PluginEntry, outcome: Outcome) -> dict[str, Any]:
    contract = ".".join(map(str, outcome.contract)) if outcome.contract else ""
    if outcome.error:
        return _row(entry, FAIL, contract, outcome.milliseconds, _hint(outcome.error))
    if entry.kind in KINDS and KINDS[entry.kind].versioned:
        try:
            check_contract(entry, outcome.contract)
        except ContractMismatch as error:
            return _row(entry, FAIL, contract, outcome.milliseconds, str(error))
    return _row(entry, PASS, contract, outcome.milliseconds)


def _hint(error: str) -> str:
    """The error with the question an expert would ask."""
    if "cannot open shared object" in error or "DLL load failed" in error:
        return f"{error} - is the vendor's runtime installed, and is its folder searched?"
    if error.startswith("ModuleNotFoundError"):
        return f"{error} - is the plugin's optional dependency installed in {sys.prefix}?"
    if "did not finish" in error:
        return (
            f"{error} - its import hangs; name the plugin in FD_PLUGINS_DISABLED to go without it"
        )
    return error


def _plain_row(
    kind: str, verdict: str, hint: str, name: str = "", origin: str = ""
) -> dict[str, Any]:
    """A row that is about no entry point."""
    return {
        "name": name,
        "kind": kind,
        "origin": origin,
        "contract": "",
        "verdict": verdict,
        "ms": 0.0,
        "hint": hint,
    }


def _row(
    entry: PluginEntry, verdict: str, contract: str = "", ms: float = 0.0, hint: str = ""
) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "origin": entry.origin,
        "contract": contract,
        "verdict": verdict,
        "ms": round(ms, 1),
        "hint": hint,
    }
