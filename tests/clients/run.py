"""Runs every client's program against real servers with the demo models, each in its environment.

    python tests/clients/run.py FOLDER    # FOLDER/CLIENT/bin/python has the client; prints a table

Session `clients` of the noxfile makes the environments.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.server_process import serving  # noqa: E402

PROGRAMS = Path(__file__).with_name("programs.py")
MODEL, SEES = (REPOSITORY / "models" / name for name in ("ernie-tiny", "qwen3-vl-tiny"))
TASKS = ("chat", "stream", "tools", "structured", "score", "generate", "picture")
SERVER = (
    *("--dtype", "float32", "--num-threads", "1"),
    *("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"),
)
LIMIT_S = 180


def run_client(python: Path, name: str, urls: tuple[str, str], home: Path) -> dict[str, str]:
    """What the client's program said: its version, and `ok` or the mistake for each task. urls: of
    MODEL and of SEES."""
    ended = subprocess.run(
        [python, PROGRAMS, name, urls[0], MODEL.name, urls[1], SEES.name],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin", "NO_PROXY": "127.0.0.1"},
    )
    said = dict(line.split(" ", 1) for line in ended.stdout.splitlines() if " " in line)
    if not set(said) & set(TASKS) or any(said.get(t, "ok") != "ok" for t in TASKS):
        print(ended.stderr[-4000:], file=sys.stderr)
    return said


def main(folder: str) -> int:
    """Print the table; 1 if a task failed or a client did not run."""
    pythons = sorted(Path(folder).glob("*/bin/python"))
    if not pythons:
        print(f"no environment in {folder}; run: nox -s clients", file=sys.stderr)
        return 1
    failed = False
    print("| client | version | " + " | ".join(TASKS) + " |")
    print("|---" * (2 + len(TASKS)) + "|")
    with serving(MODEL, *SERVER) as server, serving(SEES, *SERVER[:4]) as seeing:
        for python in pythons:
            name = python.parents[1].name
            said = run_client(python, name, (server.url, seeing.url), Path(folder))
            cells = [said.get(task, "") for task in TASKS]
            failed = failed or not any(cells) or any(c not in ("", "ok") for c in cells)
            row = [f"`{name}`", said.get("version", "did not start"), *cells]
            print("| " + " | ".join(row) + " |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
