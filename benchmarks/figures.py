"""A benchmark's measurements, as one line for programs (see compare_checkouts.py).

A figure's name ends in its unit, after a comma. Less is better, unless the unit is a rate
("tokens/s"). Its values are those of the rounds of one run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping

OPTION = "--json"
_KEY = "figures"


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """The option that asks for the line."""
    parser.add_argument(OPTION, action="store_true", help="print one JSON line as well")


def print_figures(options: argparse.Namespace, figures: Mapping[str, Iterable[float]]) -> None:
    """Print the line, if the option asks for it."""
    if options.json:
        # Child processes may write to the same terminal; a single write cannot be split by their
        # output.
        sys.stdout.write(json.dumps({_KEY: {n: list(v) for n, v in figures.items()}}) + "\n")
        sys.stdout.flush()


def read_figures(text: str) -> dict[str, list[float]]:
    """The figures in what a benchmark printed; ValueError if they are not there."""
    for line in reversed(text.splitlines()):
        if line.startswith(f'{{"{_KEY}"'):
            figures: dict[str, list[float]] = json.loads(line)[_KEY]
            return figures
    raise ValueError(f"no line of figures, which {OPTION} asks for")


def is_rate(name: str) -> bool:
    """Whether more of a figure is better."""
    return name.endswith("/s")
