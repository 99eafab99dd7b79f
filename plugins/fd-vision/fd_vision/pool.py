"""A bounded number of processes that decode; one that takes too long is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from fastdeploy_core.errors import InvalidRequest

from .child import Answer, Job, read_frame, write_frame

MOST_CHILDREN = 8
START_LIMIT_S = 120.0  # of a process, which no job has to answer for
PIPE_BYTES = 2**20  # what Linux allows everyone
MEMORY_BYTES = 2**30  # that a picture or video may take
SWITCH_S = 0.0005
# What Python needs to start; nothing here can hold a secret.
_ENVIRONMENT = frozenset({"LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH"})


@dataclass(slots=True)
class _Place:
    """One process."""

    child: subprocess.Popen[bytes] | None = None
    is_ready: bool = False  # it has said that it can work


class QuickSwitches(contextlib.ContextDecorator):
    """While any thread is in here, a thread that waits for the interpreter gets it after SWITCH_S:
    steps and event loops would wait Python's 5 ms, at each of their many waits, for threads that
    prepare pictures. Thread safe."""

    def __init__(self) -> None:
        self._lock, self._count, self._before = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_S, self._before))
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                sys.setswitchinterval(self._before)


class DecodingPool:
    """Runs jobs in child processes, each started when it is first needed, or by start(). Thread
    safe; a caller waits for a free process."""

    def __init__(self, num_children: int = 0, memory_bytes: int = MEMORY_BYTES) -> None:
        """num_children: 0 for half of this machine's processors, 2 to 8."""
        num_children = num_children or max(2, min(MOST_CHILDREN, (os.cpu_count() or 1) // 2))
        self._memory_bytes = memory_bytes
        # The one that worked last works next, so that no more start than are needed.
        self._places: queue.LifoQueue[_Place] = queue.LifoQueue()
        self._all = [_Place() for _ in range(num_children)]
        for place in self._all:
            self._places.put(place)
        self.num_deaths = 0  # children that were killed or ended by themselves
        self._is_closed = False

    def start(self) -> None:
        """Start all processes and do not wait: they import what they need while others load a
        model, and the first pictures need not wait for that."""
        for place in self._all:
            if place.child is None:
                place.child = self._start()

    def run(self, job: Job) -> Answer:
        """The patches; InvalidRequest if there are none."""
        place = self._places.get()
        try:
            made = self._ask(place, job)
        finally:
            self._places.put(place)
        if made is None:
            raise InvalidRequest(f"the {job.word} takes too long or too much memory to decode")
        if made.error:
            raise InvalidRequest(made.error)
        return made

    def close(self) -> None:
        """End all processes; callers that wait get an error."""
        self._is_closed = True
        for place in self._all:
            child, place.child = place.child, None
            if child is not None:
                child.kill()
                _reap(child)

    def _ask(self, place: _Place, job: Job) -> Answer | None:
        """None: the process is gone."""
        if self._is_closed:
            raise InvalidRequest("the server is shutting down")
        child = place.child
        if child is None or child.poll() is not None:
            child, place.is_ready = self._start(), False
            place.child = child
        if not place.is_ready and child.stdout is not None:
            with _killed_after(child, START_LIMIT_S):
                read_frame(child.stdout)
            place.is_ready = True
        try:
            with _killed_after(child, job.time_limit_s):
                if child.stdin is not None:
                    write_frame(child.stdin, msgspec.msgpack.encode(job))
                if child.stdout is not None and (body := read_frame(child.stdout)):
                    return msgspec.msgpack.decode(body, type=Answer)
        except OSError:
            pass  # a pipe to a process that is gone
        self.num_deaths += 1
        place.child = None
        child.kill()
        _reap(child)
        return None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k in _ENVIRONMENT}
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", "fd_vision.child", str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        # A picture passes in a few pieces and not in fifty, after each of which this thread would
        # have to wait for the interpreter's lock, as the thread that runs steps would for this one.
        for pipe in (child.stdin, child.stdout):
            if pipe is not None and hasattr(fcntl, "F_SETPIPE_SZ"):
                with contextlib.suppress(OSError):  # more than the system allows
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return child


@contextlib.contextmanager
def _killed_after(child: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _reap(child: subprocess.Popen[bytes]) -> None:
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written yet goes to nobody
                pipe.close()
