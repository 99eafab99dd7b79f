"""Compiles the runtime once per machine and PaddlePaddle version, and installs it under type names.

One g++ command. The result is kept in the user's cache folder; a copy named libpaddle-sim-<type>.so
is a device type, because the library reads its type from its own file name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread"),
    "-w",  # Paddle's headers warn
    # Several copies live in one process: none may take another's functions or variables for its
    # own.
    *("-fvisibility=hidden", "-fno-gnu-unique", "-Wl,-Bsymbolic"),
    *("-DPADDLE_WITH_CUSTOM_DEVICE", "-DPADDLE_WITH_CUSTOM_KERNEL"),
)
LIBRARIES = ("-l:libphi_core.so", "-l:libphi.so", "-l:libcommon.so", "-lrt")


class SimulationUnavailable(RuntimeError):
    """No compiler or no PaddlePaddle; the message says which."""


def paddle_folder() -> Path:
    """Where PaddlePaddle is installed, found without importing it."""
    found = importlib.util.find_spec("paddle")
    if found is None or not found.submodule_search_locations:
        raise SimulationUnavailable("PaddlePaddle is not installed; run: pip install paddlepaddle")
    return Path(found.submodule_search_locations[0])


def build() -> Path:
    """The compiled library; made if there is none of these sources and this PaddlePaddle yet."""
    package, sources = paddle_folder(), sorted(NATIVE.glob("*.cc"))
    digest = hashlib.sha256(importlib.metadata.version("paddlepaddle").encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.read_bytes())
    include = package / "include"
    options = [
        *FLAGS,
        *(f"-I{include}", f"-I{include / 'third_party'}"),
        *map(str, sources),
        *(f"-L{package / 'libs'}", *LIBRARIES, "-Wl,--allow-shlib-undefined"),
    ]
    return compiled(f"runtime-{digest.hexdigest()[:16]}.so", options)


def compiled(name: str, options: list[str]) -> Path:
    """The library of that name in the cache folder, made by g++ with these options if it is not
    there."""
    target = _cache_folder() / name
    if target.exists():
        return target
    compiler = shutil.which("g++")
    if compiler is None:
        raise SimulationUnavailable("g++ is not installed; it compiles the simulated device")
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    command = [compiler, *options, "-o", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if result.returncode:
        Path(name).unlink()
        raise SimulationUnavailable(f"g++ failed:\n{result.stderr[-4000:]}")
    Path(name).replace(target)  # at once, since other processes may be building it, too
    return target


def install(folder: Path, types: Iterable[str]) -> dict[str, str]:
    """Make `folder` a CUSTOM_DEVICE_ROOT with these device types; returns the environment to set.

    Knobs and counters of type T are then in folder/panel/T, see panel.py.
    """
    library = build()
    panels = folder / "panel"
    panels.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in types:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(f"a device type is lower-case letters, digits and _, got {name!r}")
        target = folder / f"libpaddle-sim-{name}.so"
        if not target.exists():
            shutil.copy(library, target)
    return {"CUSTOM_DEVICE_ROOT": str(folder), "SIM_PANEL": str(panels), "GLOG_minloglevel": "2"}


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fastdeploy" / "simdevice"
