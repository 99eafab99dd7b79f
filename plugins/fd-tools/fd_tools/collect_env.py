"""`fastdeploy collect-env`: what a bug report needs, secrets left out."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdeploy_core import __version__
from fastdeploy_core.contracts.command import CommandParser

PACKAGES = (
    "fastdeploy-core", "paddlepaddle", "torch", "numpy", "transformers", "tokenizers",
    "safetensors", "fastapi", "starlette", "uvicorn", "httptools", "uvloop", "pydantic", "msgspec",
    "pyzmq", "llguidance", "xgrammar", "pluggy", "stevedore", "prometheus-client", "openai",
)  # fmt: skip
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_SETTINGS = re.compile(r"FD_|FLAGS_|OMP_|MKL_|.*VISIBLE_DEVICES$")


def main(argv: Sequence[str]) -> int:
    """Print the environment."""
    parser = CommandParser(prog="fastdeploy collect-env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args(argv)
    found = collect(os.environ)
    if arguments.json:
        print(json.dumps(found))
        return 0
    for section, rows in found.items():
        print(f"{section}:")
        for name, value in rows.items():
            print(f"  {name}: {value}")
    return 0


def collect(environ: Any) -> dict[str, dict[str, Any]]:
    """Sections of facts; imports no tensor library and no plugin."""
    return {
        "fastdeploy": {"version": __version__, "python": sys.version.split()[0]},
        "machine": _machine(),
        "packages": _packages(),
        "plugins": _plugins(),
        "environment": {
            name: "***" if _SECRET.search(name) else value
            for name, value in sorted(environ.items())
            if _SETTINGS.match(name)
        },
    }


def _machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "processor": _cpu_model() or platform.processor() or platform.machine(),
        "processors_usable": len(os.sched_getaffinity(0)),
        "disk_free_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
    }
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        facts["memory_gib"] = round(pages * size / 2**30, 1)
    except (ValueError, OSError):
        facts["memory_gib"] = "unknown"
    return facts


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _plugins() -> dict[str, str]:
    from fastdeploy_core.plugins.discovery import discover

    rows: dict[str, list[str]] = {}
    for entry in discover().entries:
        shown = f"{entry.kind} {entry.name}"
        if entry.status != "ok":
            shown += f" ({entry.status}: {entry.reason})"
        rows.setdefault(f"{entry.distribution} {entry.version}", []).append(shown)
    return {distribution: ", ".join(names) for distribution, names in rows.items()}
