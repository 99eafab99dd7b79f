"""Runs every client's program against real servers with the demo models, each in its environment.

    python tests/clients/run.py FOLDER [CLIENT ...]    # these, or all; prints a table

FOLDER/CLIENT/bin/python has a client of Python's, FOLDER/npm/CLIENT/node_modules one of npm's.
Session `clients` of the noxfile makes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.server_process import serving  # noqa: E402

PROGRAMS = Path(__file__).with_name("programs")
MODEL, SEES = (REPOSITORY / "models" / name for name in ("ernie-tiny", "qwen3-vl-tiny"))
TASKS = ("chat", "stream", "tools", "structured", "score", "generate", "picture", "embed", "load")
SERVER = (
    *("--dtype", "float32", "--num-threads", "1"),
    *("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"),
)
NONE = "-"  # the library has no such call
LIMIT_S = 600


def found_clients(folder: Path) -> dict[str, tuple[Path, list[str | Path]]]:
    """By name: the folder that a client runs in, and what runs its program there."""
    of_python = {
        python.parents[1].name: (folder, [python, PROGRAMS.with_suffix(".py")])
        for python in sorted(folder.glob("*/bin/python"))
    }
    of_npm: dict[str, tuple[Path, list[str | Path]]] = {}
    for modules in sorted(
        [*folder.glob("npm/*/node_modules"), *folder.glob("npm/@*/*/node_modules")]
    ):
        name = modules.parent.relative_to(folder)
        of_npm[str(name)] = (modules.parent, ["node", PROGRAMS.with_suffix(".mjs")])
    return {**of_python, **of_npm}


def run_client(
    name: str, place: Path, program: Sequence[str | Path], servers: Sequence[str], home: Path
) -> dict[str, str]:
    """What the client's program said: its version, and `ok` or the mistake for each task. servers:
    URL and model of each."""
    ended = subprocess.run(
        [*program, name.removeprefix("npm/"), *servers],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={"HOME": str(home), "PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1"},
    )
    said = dict(line.split(" ", 1) for line in ended.stdout.splitlines() if " " in line)
    if not set(said) & set(TASKS) or any(said.get(t, "ok") != "ok" for t in TASKS):
        print(ended.stderr[-4000:], file=sys.stderr)
    return said


def main(folder: str, *wanted: str) -> int:
    """Print the table; 1 if a task failed or a client did not run."""
    clients = found_clients(Path(folder).resolve())
    if missing := set(wanted) - set(clients) or (set() if clients else {"any client"}):
        print(f"{folder} has not {', '.join(missing)}; run: nox -s clients", file=sys.stderr)
        return 1
    failed = False
    print("| client | version | " + " | ".join(TASKS) + " |")
    print("|---" * (2 + len(TASKS)) + "|")
    with (
        serving(MODEL, *SERVER) as reads,
        serving(SEES, *SERVER[:4]) as sees,
        serving(MODEL, *SERVER[:4], "--runner", "pooling") as embeds,
    ):
        servers = [reads.url, MODEL.name, sees.url, SEES.name, embeds.url, MODEL.name]
        for name, (place, program) in clients.items():
            if wanted and name not in wanted:
                continue
            said = run_client(name, place, program, servers, Path(folder))
            cells = [said.get(task, NONE) for task in TASKS]
            failed = failed or set(cells) == {NONE} or not {*cells} <= {NONE, "ok"}
            row = [f"`{name}`", said.get("version", "did not start"), *cells]
            print("| " + " | ".join(row) + " |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
