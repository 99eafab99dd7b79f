"""Starting a Python process of ours and making sure that it never outlives its parent.

A child gets its first record over standard input, which then stays open: end of file means that the
parent is gone. On Linux the kernel kills it as well, in case the interpreter is stuck. No
multiprocessing: nothing is pickled and the user's main module is not imported again.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

from fastdeploy_core import envs
from fastdeploy_core.engine.processes.log_format import LineFormatter

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from fastdeploy_core.engine.processes.child import run_child; run_child(sys.argv[2])"
)
_PR_SET_PDEATHSIG = 1
_HEADER = struct.Struct("<Q")
FOLDER_PREFIX = "fd-run-"
PARENT_GONE = 3  # exit status of a child whose parent died
MAX_SOCKET_PATH = 100  # the operating system allows 107 bytes


class PrivateFolder:
    """A new folder that only this user can enter, with a path short enough for sockets in it.

    It is locked while its owner lives. What owners left behind that were killed before they could
    tidy up is removed when the next folder is made.
    """

    def __init__(self, purpose: str) -> None:
        prefix = f"{FOLDER_PREFIX}{purpose}-{os.getpid()}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        if len(str(self.path)) > MAX_SOCKET_PATH - 20:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
        # Locked before it has its name: a folder with an unlocked lock file is nobody's any more.
        unnamed = self.path / "lock.new"
        self._lock = unnamed.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / "lock")
        self._sweep()

    def __str__(self) -> str:
        return str(self.path)

    def remove(self) -> None:
        """Delete it with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def _sweep(self) -> None:
        for lock in self.path.parent.glob(f"{FOLDER_PREFIX}*/lock"):
            # The error is what a folder answers that somebody lives in, or that is not ours.
            with contextlib.suppress(OSError), lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)


def spawn(target: str, init: bytes, label: str) -> subprocess.Popen[bytes]:
    """Start `target` ("module:function", called with init) in a new interpreter.

    The calling thread must live as long as the child may: on Linux its end kills the child.
    """
    process = spawn_early(target, label)
    give(process, init)
    return process


def spawn_early(target: str, label: str, modules: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """The same before there is anything to tell it: the child imports what it will need, `modules`
    among it, while it waits for `give`."""
    paths = [path for path in sys.path if isinstance(path, str)]
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", "-c", _BOOT, json.dumps(paths), target, label, *modules],
        stdin=subprocess.PIPE,
    )


def give(process: subprocess.Popen[bytes], init: bytes) -> None:
    """Tell a child that was spawned early what it is to do."""
    assert process.stdin is not None, "the pipe was asked for"
    # A child that died at once is reported by whoever waits for it, with its exit status.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(_HEADER.pack(len(init)) + init)
        process.stdin.flush()


def exit_descriptor(process: subprocess.Popen[bytes]) -> int | None:
    """A descriptor, the caller's to close, that can be read when the child has ended. None: the
    system has no such thing, its end has to be asked for now and then."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # a kernel or a sandbox that does not know it
        return None


def end_startup() -> None:
    """Called by a child when it is ready: what exists by now stays, so the garbage collector, which
    was off while it was made, need never look at it and later pauses nobody for long."""
    gc.collect()
    gc.freeze()
    gc.enable()


def end(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Wait for a child that was told to stop; after grace_s terminate it, then kill it."""
    for signal_number, wait_s in ((None, grace_s), (signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0)):
        if signal_number is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            break
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    return process.returncode if process.returncode is not None else -1


def describe_exit(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "still runs"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def run_child(target: str) -> None:
    """Entry point of every child."""
    pipe = _take_standard_input()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process=sys.argv[3]))
    logging.basicConfig(level=envs.read("FD_LOG_LEVEL").upper(), handlers=[handler])
    gc.disable()  # until end_startup
    module, _, function = target.partition(":")
    main = getattr(importlib.import_module(module), function)  # the first record may come later
    _import_early(sys.argv[4:])
    (length,) = _HEADER.unpack(_read(pipe, _HEADER.size))
    init = _read(pipe, length)
    threading.Thread(target=_watch_parent, args=(pipe,), name="fd-parent", daemon=True).start()
    status = main(init)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads stuck in a device call must not keep the process alive.
    os._exit(status or 0)


def _import_early(modules: Sequence[str]) -> None:
    """Those that fail are imported again by whoever needs them, who says so then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)


def _take_standard_input() -> int:
    """Keep the pipe under another number; libraries that read standard input find it empty."""
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return pipe


def _read(pipe: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = os.read(pipe, min(length - len(data), 1 << 20))
        if not part:
            os._exit(PARENT_GONE)
        data += part
    return bytes(data)


def _watch_parent(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os._exit(PARENT_GONE)
