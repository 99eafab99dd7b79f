"""The engine's process, started before anybody has read what it is to serve.

What it imports takes longer than everything else at a start, so the command starts it first
(`prepare`); the supervisor takes it (`spawn`) when there is something to tell it.
"""

from __future__ import annotations

import subprocess

from fastdeploy_core.tensor import early_import

from . import child

_prepared: list[tuple[str, subprocess.Popen[bytes]]] = []


def prepare(tensor_library: str) -> None:
    """Start one. The calling thread must live as long as the engine may: see child.spawn."""
    _prepared.append((tensor_library, _start(tensor_library)))


def spawn(tensor_library: str) -> subprocess.Popen[bytes]:
    """The one that was prepared for this library, or a new one; told nothing yet."""
    if _prepared and _prepared[0][0] == tensor_library and _prepared[0][1].poll() is None:
        return _prepared.pop()[1]
    return _start(tensor_library)


def discard() -> None:
    """End what was prepared and nobody took."""
    while _prepared:
        child.end(_prepared.pop()[1], 0.0)


def _start(tensor_library: str) -> subprocess.Popen[bytes]:
    library = early_import(tensor_library)
    modules = [library] if library else []
    modules.append("fastdeploy_core.worker.worker")
    return child.spawn_early(
        "fastdeploy_core.engine.processes.engine_process:main", "fastdeploy-engine", modules
    )
