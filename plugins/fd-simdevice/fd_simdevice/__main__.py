"""Print the environment in which PaddlePaddle finds simulated devices.

eval "$(python -m fd_simdevice acme)"
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from .build import SimulationUnavailable, install


def main() -> int:
    """Install the device types named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m fd_simdevice", description=__doc__)
    parser.add_argument("types", nargs="+", help="device type names, such as acme")
    parser.add_argument("--folder", type=Path, help="where to put them (default: a fresh folder)")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="simulated-"))
    try:
        environment = install(folder.resolve(), arguments.types)
    except (SimulationUnavailable, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for name, value in environment.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
