"""Starts Python processes of this project and makes sure that none outlives its parent.

A child reads its first record from standard input, which then stays open: end of file means that
the parent is gone. On Linux the kernel kills the child as well, in case its interpreter is stuck.
multiprocessing is not used: nothing is pickled and the user's main module is not imported again.
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
import select
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
from fastdeploy_core.engine.processes.log_format import DailyFile, LineFormatter, handlers
from fastdeploy_core.metadata import tolerate_damage

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

    Its owner holds a lock on it. Folders of owners that were killed before they could remove them
    are removed when the next folder is made.
    """

    def __init__(self, purpose: str) -> None:
        prefix = f"{FOLDER_PREFIX}{purpose}-{os.getpid()}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        if len(str(self.path)) > MAX_SOCKET_PATH - 20:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
        # Lock the file before giving it its name: an unlocked lock file marks a folder as
        # abandoned.
        unnamed = self.path / "lock.new"
        self._lock = unnamed.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / "lock")
        self._sweep()

    def __str__(self) -> str:
        return str(self.path)

    def remove(self) -> None:
        """Delete the folder with its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def _sweep(self) -> None:
        for lock in self.path.parent.glob(f"{FOLDER_PREFIX}*/lock"):
            # An error here means: the owner of that folder lives, or the folder belongs to another
            # user.
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
    """Start `target` before its first record exists: while it waits for `give`, the child imports
    what it will need, `modules` included."""
    paths = [path for path in sys.path if isinstance(path, str)]
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", "-c", _BOOT, json.dumps(paths), target, label, *modules],
        stdin=subprocess.PIPE,
    )


def give(process: subprocess.Popen[bytes], init: bytes) -> None:
    """Send its first record to a child that was started by `spawn_early`."""
    assert process.stdin is not None, "the pipe was asked for"
    # If a child died at once, the caller that waits for it reports so, with its exit status.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(_HEADER.pack(len(init)) + init)
        process.stdin.flush()


def exit_descriptor(process: subprocess.Popen[bytes]) -> int | None:
    """A descriptor that becomes readable when the child has ended; the caller closes it. None: the
    system offers none, so the caller has to poll the process."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # the kernel or a sandbox does not know the call
        return None


def name_in_log(name: str) -> None:
    """Called by a child that learns only from its first record which of several it is."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, LineFormatter):
            handler.formatter.name_process(name)
        if isinstance(handler, DailyFile):
            handler.name_process(name)


def end_startup() -> None:
    """Called by a child when it is ready. The garbage collector was off while start-up objects were
    made; they live for good, so it now skips them and its later pauses are short."""
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


def stop_signals() -> list[signal.Signals]:
    """What asks a server to end. A terminal that closes does, unless it is ignored (nohup)."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


def run_child(target: str) -> None:
    """Entry point of every child."""
    pipe = _take_standard_input()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    poll = select.poll()
    poll.register(pipe, 0)  # told of its end alone
    if poll.poll(0):  # the parent died before the kernel was asked
        os._exit(PARENT_GONE)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides what these mean
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    level = envs.read("FD_LOG_LEVEL").upper()
    logging.basicConfig(level=level, handlers=handlers(process=sys.argv[3]))
    gc.disable()  # until end_startup
    module, _, function = target.partition(":")
    # before the first record is read, which may come later
    main = getattr(importlib.import_module(module), function)
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
    """Import modules. One that fails is imported again by the code that needs it, which raises."""
    tolerate_damage()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)


def _take_standard_input() -> int:
    """Move the pipe to another descriptor: libraries which read standard input find it empty."""
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
