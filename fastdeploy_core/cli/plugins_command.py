"""`fastdeploy plugins list | show | why | doctor | check | new`.

`list` must answer within a quarter of a second: this module and what `list` imports know neither
pluggy nor msgspec nor numpy. Each other subcommand imports its own module when it is called.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from fastdeploy_core.contracts.base import KINDS
from fastdeploy_core.plugins.discovery import HOOKS, discover
from fastdeploy_core.plugins.report import inventory_data, inventory_table


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; errors of this project propagate to the caller."""
    parser = build_parser()
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    if arguments.command == "list":
        return list_plugins(arguments)
    module = importlib.import_module(f"fastdeploy_core.cli.plugins_{arguments.command}")
    return int(module.run(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Every subcommand's arguments; imports none of their modules."""
    parser = argparse.ArgumentParser(
        prog="fastdeploy plugins", description="What is installed, what is chosen and why."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("list", help="name, kind, distribution, version, status")
    command.add_argument("--kind", choices=[*KINDS, HOOKS], help="only this kind")
    command.add_argument("--json", action="store_true", help="the stable form for programs")

    command = commands.add_parser("show", help="drivers, hooks and capabilities of one plugin")
    command.add_argument("name", help="a distribution, or the name of a driver")
    command.add_argument("--json", action="store_true", help="the stable form for programs")

    command = commands.add_parser("why", help="every candidate, its answer, and the winner")
    command.add_argument("kind", choices=list(KINDS), help="what is to be chosen")
    command.add_argument("--model", metavar="DIR", help="model folder (attention, moe, quantizer)")
    command.add_argument("--device", default="", help="device instead of the negotiated one")
    command.add_argument("--dtype", default="auto", help="model dtype")
    command.add_argument("--tensor-parallel-size", type=int, default=1)
    command.add_argument("--block-size", type=int, default=64)
    command.add_argument("--kv-cache-dtype", default="auto")
    command.add_argument("--quantization", default="", help="number format by name")
    command.add_argument("--json", action="store_true", help="the stable form for programs")

    command = commands.add_parser("doctor", help="load each plugin in a child process")
    command.add_argument("--json", action="store_true", help="the stable form for programs")
    command.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds one import may take"
    )

    command = commands.add_parser("check", help="run the conformance kit against a driver")
    command.add_argument("name", help="name of the driver, or of a distribution with one device")
    command.add_argument("--kind", choices=list(KINDS), help="needed when several kinds have it")
    command.add_argument("--tensor", default="", help="tensor library: torch or paddle")
    command.add_argument(
        "--device", default="", help="where to run; default: its distribution's device, or cpu"
    )
    command.add_argument("--model", default="", metavar="DIR", help="target for a drafter's checks")
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of the driver itself; may be repeated",
    )
    command.add_argument("--report", metavar="FILE", help="write the results as JSON")
    command.add_argument("-k", dest="keyword", default="", help="only tests that match, as pytest")
    command.add_argument("-v", dest="verbose", action="store_true", help="one line per test")

    command = commands.add_parser("new", help="start a plugin from a template")
    command.add_argument("name", help="name of the distribution, such as fd-mychip")
    command.add_argument("--kind", choices=["device", "drafter"], default="device")
    command.add_argument("--dir", default=".", help="where to create the folder")
    return parser


def list_plugins(arguments: argparse.Namespace) -> int:
    """Print what is installed; reads metadata only."""
    inventory = discover()
    entries = [e for e in inventory.entries if arguments.kind in (None, e.kind)]
    if arguments.json:
        print(json.dumps(inventory_data(inventory, entries), indent=2))
        return 0
    print(inventory_table(entries))
    for problem in inventory.problems:
        print(f"problem: {problem}", file=sys.stderr)
    if not inventory.entries:
        print("nothing is installed: run pip install fastdeploy-core", file=sys.stderr)
    return 0
