"""`fastdeploy plugins list`: what is installed, from metadata alone.

It must answer within a quarter of a second: this module and what it imports know neither pluggy nor
msgspec nor numpy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from fastdeploy_core.contracts.base import KINDS
from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.plugins.discovery import HOOKS, discover
from fastdeploy_core.plugins.report import inventory_data, inventory_table


def main(argv: Sequence[str]) -> int:
    """Print what is installed."""
    arguments = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fastdeploy plugins list",
        description="What is installed: name, kind, distribution, version, status.",
    )
    parser.add_argument("--kind", choices=[*KINDS, HOOKS], help="only this kind")
    parser.add_argument("--json", action="store_true", help="the stable form for programs")
    return parser
