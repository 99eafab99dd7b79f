"""`fastdeploy plugins check NAME`: the conformance kit against one driver, in its own pytest."""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fastdeploy_core.contracts.base import DISTRIBUTION, KINDS
from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.errors import ConfigError, PluginNotFound
from fastdeploy_core.plugins.discovery import HOOKS, OK, Inventory, discover
from fastdeploy_core.plugins.drivers import find
from fastdeploy_core.tensor import available

KIT = "fastdeploy_testing.conformance"
# Kinds that have a suite; other kinds only get the hygiene tests.
KINDS_WITH_SUITE = (
    "device",
    "attention",
    "state",
    "moe",
    "expert_communicator",
    "quantizer",
    "speculative",
    "scheduler",
    "kv_transport",
    "kv_store",
    "model",
    "reasoning_parser",
    "tool_parser",
    "logits_processor",
    "grammar",
    "launcher",
)
# Kinds whose suites make tensors.
KINDS_THAT_COMPUTE = frozenset(KINDS_WITH_SUITE) - {
    "scheduler",
    "kv_transport",
    "kv_store",
    "reasoning_parser",
    "tool_parser",
    "grammar",
    "launcher",
} | {"kernels"}


def main(argv: Sequence[str]) -> int:
    """Run the kit; the exit code is pytest's (0: all tests that apply have passed)."""
    arguments = _parser().parse_args(argv)
    inventory = discover()
    name = device_of(inventory, arguments.name) or arguments.name
    kind = arguments.kind or kind_of(inventory, name)
    entry = find(kind, name, inventory)
    device = arguments.device or device_of(inventory, entry.distribution)
    if kind in KINDS_THAT_COMPUTE and not available():
        raise ConfigError(
            f"a {kind} is checked on a tensor library, and none is installed; "
            f'run: pip install "{DISTRIBUTION}[torch]" or "{DISTRIBUTION}[paddle]"'
        )
    with tempfile.TemporaryDirectory(prefix="fastdeploy-check-") as folder:
        # An empty folder as root: no conftest or setting of the current directory is used.
        (Path(folder) / "pytest.ini").write_text("[pytest]\n", "utf-8")
        command = [
            sys.executable, "-P", "-m", "pytest", "--rootdir", folder, "-c", f"{folder}/pytest.ini",
            "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:asyncio",
            "-p", "fastdeploy_testing.pytest_plugin",
            "--pyargs", *suites(kind), "--fd-driver", name, "--fd-kind", kind,
        ]  # fmt: skip
        if arguments.mutants:
            command += ["-p", _hunt(kind)]
        if arguments.tensor:
            command += ["--fd-tensor", arguments.tensor]
        if device:
            command += ["--fd-device", device]
        if arguments.model:
            command += ["--fd-model", str(Path(arguments.model).absolute())]
        for option in arguments.option:
            command += ["--fd-option", option]
        if arguments.report:
            command += ["--fd-report", str(Path(arguments.report).absolute())]
        if arguments.keyword:
            command += ["-k", arguments.keyword]
        # Without -v the kit's own summary says in a line what each failed test found.
        command += ["-v", "--tb=short"] if arguments.verbose else ["-q", "--tb=no", "-rN"]
        return subprocess.call(command)  # noqa: S603 - our own interpreter


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fastdeploy plugins check", description="Run the conformance kit against a driver."
    )
    parser.add_argument("name", help="name of the driver, or of a distribution with one device")
    parser.add_argument("--kind", choices=list(KINDS), help="needed when several kinds have it")
    parser.add_argument("--tensor", default="", help="tensor library: torch or paddle")
    parser.add_argument(
        "--device", default="", help="where to run; default: its distribution's device, or cpu"
    )
    parser.add_argument("--model", default="", metavar="DIR", help="target for a drafter's checks")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of the driver itself; may be repeated",
    )
    parser.add_argument("--report", metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="run each test on drivers with one fault each, too, and print how many are found",
    )
    parser.add_argument("-k", dest="keyword", default="", help="only tests that match, as pytest")
    parser.add_argument(
        "-v", dest="verbose", action="store_true", help="one line per test, and tracebacks"
    )
    return parser


def _hunt(kind: str) -> str:
    """The module that makes mutants of that kind."""
    from .conformance.driver_mutants import KINDS_WITH_MUTANTS

    if kind in ("device", "kernels"):
        return f"{KIT}.mutants"
    if kind in KINDS_WITH_MUTANTS:
        return f"{KIT}.driver_mutants"
    possible = ", ".join(sorted(("device", "kernels", *KINDS_WITH_MUTANTS)))
    raise ConfigError(f"there are no mutants of kind {kind}; of: {possible}")


def suites(kind: str) -> list[str]:
    """Test modules for one kind; a device is checked with everything that runs on it."""
    names = {
        "device": [
            "device",
            "ops",
            "quantized_ops",
            "attention",
            "kv_formats",
            "moe",
            "end_to_end",
        ],
        "attention": ["attention", "kv_formats"],
        "kernels": ["ops", "quantized_ops"],
        "speculative": ["drafter"],
        "scheduler": ["request_scheduler"],
        "kv_transport": ["kv_transport", "kv_transport_faults"],
        "reasoning_parser": ["stream_parser"],
        "tool_parser": ["stream_parser"],
    }.get(kind, [kind] if kind in KINDS_WITH_SUITE else [])
    return [f"{KIT}.test_{name}" for name in ["hygiene", *names]]


def device_of(inventory: Inventory, distribution: str) -> str:
    """The device of a distribution that has exactly one; empty for all others."""
    own = {
        e.name for e in inventory.entries if e.kind == "device" and e.distribution == distribution
    }
    return own.pop() if len(own) == 1 else ""


def kind_of(inventory: Inventory, name: str) -> str:
    """The kind of the named driver; ConfigError if the name alone does not tell."""
    kinds = list(dict.fromkeys(e.kind for e in inventory.entries if e.name == name))
    # A device and a driver that runs on it may share a name; the device's check includes the
    # driver.
    kinds = [k for k in kinds if k != HOOKS]
    if "device" in kinds:
        return "device"
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise ConfigError(
            f"{name!r} is the name of several drivers: {', '.join(kinds)}; choose with --kind"
        )
    drivers = {e.name for e in inventory.entries if e.status == OK}
    near = difflib.get_close_matches(name, drivers, n=3)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    raise PluginNotFound(f"no driver {name!r}{meant}; run: fastdeploy plugins list")
