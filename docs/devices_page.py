"""The support matrix: vendor devices and their limits records, read from the plugins' own facts."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fd_tools import plugins_report

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"
REPORTS = Path(__file__).resolve().parent / "devices" / "reports"
Cell = Callable[[Any], str]


def _yes(value: object) -> str:
    return "yes" if value else "no"


def code_lines(path: Path) -> int:
    """Lines of a file that are neither empty nor comments nor docstrings."""
    text = path.read_text("utf-8")
    documents: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            documents |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        number not in documents and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in lines
    )


def package_of(name: str) -> Path:
    """Where a device's plugin keeps its code."""
    return PLUGINS / f"fd-{name}" / f"fd_{name}"


def on_torch(facts: Any) -> str:
    """Type and collectives of the vendor's torch, where the plugin has that door, too."""
    door = getattr(importlib.import_module(f"fd_{facts.name}.device"), "TORCH", None)
    return f"`{door.type_name}`, {door.collectives}" if door else "no"


# Column title -> the cell of a facts record.
COLUMNS: dict[str, Cell] = {
    "device": lambda f: f"[`{f.name}`](../devices/{f.name}.md)",
    "exercised on": lambda f: f.exercised_on,
    "PaddlePaddle's type": lambda f: (
        f"`{f.builtin_type or f.type_name}`" + (" (built in)" if f.builtin_check else "")
    ),
    "dtypes": lambda f: ", ".join(f.limits.dtypes),
    "KV blocks": lambda f: (
        ", ".join(map(str, f.limits.block_sizes))
        if f.limits.block_sizes
        else f"any, {f.limits.default_block_size} by default"
    ),
    "blocks shared": lambda f: _yes(f.limits.block_sharing),
    "mixed batches": lambda f: _yes(f.limits.mixed_batches),
    "prompts in parts": lambda f: _yes(f.limits.chunked_prefill),
    "prompts per step": lambda f: str(f.limits.max_prefills_per_step or "any"),
    "padded to": lambda f: "rows x tokens x blocks" if f.limits.step_buckets else "no",
    "graphs": lambda f: _yes(f.limits.graph_capture),
    "ranks": lambda f: str(f.limits.max_tensor_parallel_size),
    "on torch": on_torch,
    "lines of code": lambda f: str(sum(map(code_lines, package_of(f.name).glob("*.py")))),
    "visible by": lambda f: ", ".join(f"`{v}`" for v in f.visible_env),
}


def facts() -> list[Any]:
    """The facts record of every plugin in this repository that has one."""
    found = []
    for folder in sorted(PLUGINS.glob("fd-*")):
        package = folder / folder.name.replace("-", "_")
        if (
            not (package / "device.py").is_file()
            or "FACTS" not in (package / "device.py").read_text()
        ):
            continue
        sys.path.insert(0, str(folder))
        try:
            found.append(importlib.import_module(f"{package.name}.device").FACTS)
        finally:
            sys.path.remove(str(folder))
    return found


def devices(table: Callable[..., str]) -> str:
    """The whole page."""
    rows = [tuple(cell(record) for cell in COLUMNS.values()) for record in facts()]
    return (
        "# Vendor devices\n\nFrom the facts that each plugin states; the scheduler obeys the same "
        "record. *simulated device*: loaded, served and conformance-tested on a simulated device "
        "behind PaddlePaddle's custom-device interface with the vendor's type name (asynchronous "
        "streams, protected memory, limits, faults, "
        "two-rank collectives, graph capture). *stand-in*: the same under another name; the "
        "vendor's built-in place has not been exercised. *on torch*: type "
        "name and collectives with --tensor-library torch; exercised for `gcu` only, on a "
        "simulated PrivateUse1 device. No vendor kernel, no vendor collective, no performance "
        "and no numeric behaviour "
        "of "
        "any of these chips has been tested by this project; [reports](#reports) are what others "
        "have seen.\n\n" + table(tuple(COLUMNS), rows) + _reports(table)
    )


def _reports(table: Callable[..., str]) -> str:
    """What owners of chips have sent: files of `fastdeploy plugins report`."""
    head = (
        "\n\n## Reports\n\nFrom machines with the chip, as `fastdeploy plugins report DEVICE "
        '--model DIR --note "chip, driver, who"` writes them. A file in '
        "docs/devices/reports/ becomes a row here.\n\n"
    )
    rows = []
    for path in sorted(REPORTS.glob("*.json")):
        report = json.loads(path.read_text("utf-8"))
        if report["format"] != plugins_report.FORMAT:
            raise SystemExit(f"{path} has format {report['format']}, not {plugins_report.FORMAT}")
        passed, failed = plugins_report.counts(report)
        part = f" of `-k {report['keyword']!r}`" if report["keyword"] else ""
        kernels, timings = report["kernels"], report["timings"]
        speeds = (timings.get("tokens_per_s_alone"), timings.get("tokens_per_s_of_eight"))
        rows.append(
            (
                f"[`{report['device']}`](../devices/reports/{path.name})",
                report["note"],
                report["date"],
                report["distribution"],
                f"{passed} passed, {failed} failed{part}",
                f"{len(kernels.get('used', ()))} of {kernels.get('operations', 0)}",
                f"{timings['model']}: {speeds[0]}, {speeds[1]}" if all(speeds) else "not timed",
            )
        )
    if not rows:
        return head + "None has come yet."
    columns = ("device", "chip", "date", "plugin", "conformance kit", "kernels of plugins")
    return head + table((*columns, "tokens/s alone, eight together"), rows)
