"""One benchmark in two checkouts of this project, in turns on one machine: medians and ratios.

    compare="python benchmarks/compare_checkouts.py"
    $compare BEFORE AFTER --rounds 5 -- benchmarks/worker_overhead.py --runs 1
    $compare BEFORE AFTER -- plugins/fd-cuda/benchmarks/engine.py ernie-0.3b

After -- follow a benchmark that prints figures (--json is added) and its arguments. Each checkout
runs its own copy in its own folder, with its .venv/bin/python or, without one, with this
interpreter. A round runs both checkouts; the order changes from round to round. A figure of a run
is the median of its values. The table shows medians over rounds (min to max), and the median of the
ratios within rounds, after to before: above 1 is worse for times, better for rates.

With --worse-at-most PERCENT the exit status is 1 if a figure's median ratio is worse than that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from figures import OPTION, add_json_option, is_rate, print_figures, read_figures

# Packages of a checkout that another checkout's installation could also provide.
_FIND = """
import importlib.util, sys
for name in sys.argv[1:]:
    found = importlib.util.find_spec(name)
    print(name, found.origin if found and found.origin else "")
"""


@dataclass
class Checkout:
    """A folder of this project, and its measurements."""

    folder: Path
    rounds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def python(self) -> str:
        """The interpreter that runs its benchmarks."""
        own = self.folder / ".venv" / "bin" / "python"
        return str(own) if own.exists() else sys.executable

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which the checkout's packages take precedence over installed ones."""
        roots = [self.folder, *sorted({package.parent for package in self.packages()[1:]})]
        path = os.pathsep.join([*map(str, roots), os.environ.get("PYTHONPATH", "")])
        return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}

    def packages(self) -> list[Path]:
        """Folders of the core and of the plugins that are written in Python."""
        found = [self.folder / "fastdeploy_core"]
        for pattern in ("*/fd_*", "*/src/fd_*", "*/python/fd_*"):
            found += sorted(self.folder.glob(f"plugins/{pattern}"))
        return [package for package in found if (package / "__init__.py").exists()]

    def check(self, script: str) -> None:
        """Raise SystemExit unless the benchmark is there and imports this checkout's packages."""
        if not (self.folder / script).is_file():
            raise SystemExit(f"{self.folder} has no {script}")
        names = [package.name for package in self.packages()]
        done = subprocess.run(
            [self.python, "-c", _FIND, *names],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        for line in done.stdout.splitlines():
            name, _, origin = line.partition(" ")
            if not origin or not Path(origin).resolve().is_relative_to(self.folder):
                raise SystemExit(
                    f"{self.python} imports {name} from {origin or 'nowhere'}, "
                    f"not from {self.folder}; make a virtual environment in "
                    f"{self.folder}/.venv and install the checkout there"
                )

    def commit(self) -> str:
        """The checkout's commit, abbreviated by git."""
        done = subprocess.run(
            ["git", "-C", str(self.folder), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() or "not a git checkout"

    def run(self, command: Sequence[str], show: bool) -> None:
        """Run the command once; SystemExit with its output if it fails."""
        script, *arguments = command
        done = subprocess.run(
            [self.python, script, OPTION, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if show:
            print(done.stdout, flush=True)
        try:
            if done.returncode:
                raise ValueError(f"exit status {done.returncode}")
            figures = read_figures(done.stdout)
        except ValueError as error:
            tail = "\n".join(done.stdout.splitlines()[-30:])
            raise SystemExit(f"{script} in {self.folder}: {error}\n{tail}") from None
        for name, values in figures.items():
            if values:
                self.rounds.setdefault(name, []).append(statistics.median(values))


@dataclass(frozen=True)
class Comparison:
    """One figure, round by round."""

    name: str
    before: list[float]
    after: list[float]

    @property
    def ratios(self) -> list[float]:
        """After to before, within rounds."""
        return [
            b / a if a else (inf if b else 1.0)
            for a, b in zip(self.before, self.after, strict=True)
        ]

    @property
    def worse_percent(self) -> float:
        """Percent by which the median ratio is worse; negative: better."""
        ratio = statistics.median(self.ratios)
        return 100 * ((1 / ratio if is_rate(self.name) else ratio) - 1)

    def line(self, width: int) -> str:
        """A line of the table."""
        cells = [f"{summary(v):>30}" for v in (self.before, self.after)]
        verdict = (
            f"{abs(self.worse_percent):.1f} % {'worse' if self.worse_percent > 0 else 'better'}"
        )
        ratios = summary(self.ratios)
        return f"{self.name:{width}} {cells[0]} {cells[1]} {ratios:>24} {verdict:>14}"


def summary(values: Sequence[float]) -> str:
    """Median and range."""
    low, middle, high = (f"{v:.4g}" for v in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def compare(before: Checkout, after: Checkout) -> list[Comparison]:
    """The figures that each run of both checkouts has; says which are left out."""
    found = []
    for name in dict.fromkeys([*before.rounds, *after.rounds]):
        a, b = before.rounds.get(name, []), after.rounds.get(name, [])
        if len(a) == len(b):
            found.append(Comparison(name, a, b))
        else:
            print(f"left out: {name} ({len(a)} and {len(b)} values)")
    if not found:
        raise SystemExit("the checkouts have no figure in common")
    return found


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", type=Path, help="folder of a checkout")
    parser.add_argument("after", type=Path, help="folder of another one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worse-at-most", type=float, metavar="PERCENT")
    parser.add_argument("--show", action="store_true", help="what the benchmarks print as well")
    add_json_option(parser)
    own, command = list(arguments), list[str]()
    if "--" in own:
        place = own.index("--")
        own, command = own[:place], own[place + 1 :]
    options = parser.parse_args(own)
    if not command:
        parser.error("say after -- which benchmark to run, e.g. -- benchmarks/engine_overhead.py")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    options.command = command
    return options


def main() -> int:
    """Run both in turns and print the table."""
    options = parse_arguments(sys.argv[1:])
    before, after = (Checkout(path.resolve()) for path in (options.before, options.after))
    for checkout in (before, after):
        checkout.check(options.command[0])
    for number in range(options.rounds):
        for checkout in (before, after) if number % 2 == 0 else (after, before):
            checkout.run(options.command, options.show)
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    found = compare(before, after)
    print(
        f"{' '.join(options.command)}: {options.rounds} rounds, {os.cpu_count()} cores, "
        f"{time.strftime('%Y-%m-%d')}\nbefore: {before.commit()} in {before.folder}\n"
        f"after:  {after.commit()} in {after.folder}\n"
    )
    width = max(len(one.name) for one in found)
    print(f"{'':{width}} {'before':>30} {'after':>30} {'after / before':>24}")
    for one in found:
        print(one.line(width))
    print_figures(options, {f"{one.name} ratio": one.ratios for one in found})
    limit = options.worse_at_most
    worse = [] if limit is None else [one for one in found if one.worse_percent > limit]
    for one in worse:
        print(f"more than {limit:g} % worse: {one.name} ({one.worse_percent:.1f} %)")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
