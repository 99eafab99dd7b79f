"""An engine process that is started before it is known what it will serve.

Its imports take longer than anything else at start-up. So the command starts the process first
(`prepare`), and the supervisor takes it over (`spawn`) once there is a configuration.
"""

from __future__ import annotations

import subprocess
import threading

from fastdeploy_core.tensor import early_import

from . import child

_lock = threading.Lock()
_prepared: list[tuple[str, subprocess.Popen[bytes]]] = []


def prepare(tensor_library: str) -> None:
    """Start one process. The calling thread must live as long as it may: see child.spawn."""
    _prepared.append((tensor_library, _start(tensor_library)))


def spawn(tensor_library: str) -> subprocess.Popen[bytes]:
    """The process prepared for this library, or a new one; it has not read its first record yet."""
    with _lock:  # several supervisors may ask at once
        if _prepared and _prepared[0][0] == tensor_library and _prepared[0][1].poll() is None:
            return _prepared.pop()[1]
    return _start(tensor_library)


def discard() -> None:
    """End a prepared process that no supervisor took."""
    while _prepared:
        child.end(_prepared.pop()[1], 0.0)


def _start(tensor_library: str) -> subprocess.Popen[bytes]:
    library = early_import(tensor_library)
    modules = [library] if library else []
    modules.append("fastdeploy_core.worker.worker")
    return child.spawn_early(
        "fastdeploy_core.engine.processes.engine_process:main", "fastdeploy-engine", modules
    )
