"""Run by test_torch.py: what each vendor's probe says of torch builds that only exist as metadata.

python -m tests.vendors.torch_probes FOLDER; prints {vendor: {case: answer}}.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fastdeploy_core.contracts import Accept
from fastdeploy_core.contracts.device import DeviceQuestion

VERSIONS = {
    "plain": "2.8.0",
    "dcu": "2.9.0+das.opt1.dtk2604",
    "iluvatar": "2.7.1+corex.4.4.0",
    "metax": "2.6.0+metax3.3.0.2",
}
MODULES = {"gcu": ("torch_gcu", "gcu"), "gaudi": ("habana_frameworks.torch.core", "hpu")}


def answer(vendor: str, library: str = "torch") -> dict[str, Any]:
    """Of its own hook module."""
    hooks = importlib.import_module(f"fd_{vendor}.hooks")
    candidate = hooks.fd_device_probe(DeviceQuestion(tensor_library=library))
    is_accepted = isinstance(candidate.verdict, Accept)
    return {
        "accepted": is_accepted,
        "reason": "" if is_accepted else candidate.verdict.reason,
        "details": candidate.details,
    }


def write_version(folder: Path, version: str) -> None:
    """A distribution `torch` of that version, before any other."""
    info = folder / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    sys.path[0] = str(folder)


def write_module(folder: Path, name: str) -> None:
    """An importable module of that name."""
    path = folder.joinpath(*name.split("."))
    for package in [p for p in path.parents if p.is_relative_to(folder) and p != folder]:
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
    path.with_suffix(".py").touch()
    importlib.invalidate_caches()


def main() -> None:
    """Every vendor on every build, then its own with no chip."""
    folder, answers = Path(sys.argv[1]), {}  # type: Path, dict[str, Any]
    sys.path.insert(0, "")
    chips = SimpleNamespace(device_count=lambda: 2)
    torch.cuda.device_count = chips.device_count  # type: ignore[assignment]
    vendors = [*MODULES, "dcu", "iluvatar", "metax"]
    for case, version in VERSIONS.items():
        write_version(folder / case, version)
        for vendor in vendors:
            answers.setdefault(vendor, {})[case] = answer(vendor)
            if case == vendor:
                torch.cuda.device_count = lambda: 0  # type: ignore[assignment]
                answers[vendor]["no chip"] = answer(vendor)
                torch.cuda.device_count = chips.device_count  # type: ignore[assignment]
    write_version(folder / "modules", VERSIONS["plain"])
    for vendor, (module, type_name) in MODULES.items():
        write_module(folder / "modules", module)
        if hasattr(torch, type_name):
            delattr(torch, type_name)
        answers[vendor]["no chip"] = answer(vendor)
        setattr(torch, type_name, chips)
        answers[vendor][vendor] = answer(vendor)
    for vendor in [*vendors, "xpu"]:
        answers.setdefault(vendor, {})["on paddle"] = answer(vendor, "paddle")
        answers[vendor]["on any"] = answer(vendor, "")
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
