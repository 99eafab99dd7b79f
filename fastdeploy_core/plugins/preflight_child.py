"""The child process that imports plugins before any other process does. preflight.py runs it as a
script.

It reads one JSON document from stdin and writes a JSON line {"id", "event": "done", ...} for each
job to the file descriptor given as first argument.

Each group of jobs is done in a fork of its own, all of them side by side, in order within a group.
A fork that ends, crashes or hangs costs its own job; another fork does the rest of its group.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import Any

_LOOK_S = 0.1  # how often clocks are looked at
_KILLED = 128 + signal.SIGKILL  # exit code of a guard whose worker was killed
_PATRICIDE = "ended its parent process"
_PID_BYTES = 12  # with which a fork begins to tell


def main() -> None:
    """Do every job, and tell what became of each."""
    channel = int(sys.argv[1])
    order = json.loads(sys.stdin.read())
    sys.path[:] = order["sys_path"]
    _warm_up()
    waiting = [list(group) for group in order["groups"]]
    forks: dict[int, _Fork] = {}
    now = time.monotonic()
    while waiting or forks:
        while waiting and len(forks) < order["at_once"]:
            fork = _Fork(waiting.pop(0), channel)
            forks[fork.reading] = fork
        ready, _, _ = select.select(list(forks), [], [], _LOOK_S)
        for fork in [forks[fd] for fd in ready]:
            if fork.read():
                continue
            del forks[fork.reading]
            waiting += fork.end()
        before, now = now, time.monotonic()
        for fork in list(forks.values()):
            # Where this process stood still, they did, too.
            if now - before < 1.0 and (limit := fork.exceeded(now)):
                del forks[fork.reading]
                waiting += fork.end(f"did not finish within {limit:g} s")
    # Threads of a plugin must not keep this process alive.
    os._exit(0)


def _warm_up() -> None:
    """Import what nearly every plugin imports, once for all forks."""
    import ctypes  # noqa: F401
    import importlib
    import importlib.metadata
    import inspect  # noqa: F401

    for name in ("base", "hookspecs", "device", "attention", "moe"):
        importlib.import_module(f"fastdeploy_core.contracts.{name}")


class _Fork:
    """A process that does the jobs of one group, as its parent sees it."""

    def __init__(self, jobs: list[dict[str, Any]], channel: int) -> None:
        self._jobs, self._channel = jobs, channel
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()  # processes that a plugin starts are ended with it
            _end_with_parent()
            for number in (1, 2):
                os.dup2(self._printed.fileno(), number)
            os.dup2(writing, channel)
            _guard(jobs, channel)
        os.close(writing)
        self._worker = int(os.read(self.reading, _PID_BYTES) or self.pid)
        self._done, self._has_failed, self._buffer = 0, False, b""
        self._restart()

    def _restart(self) -> None:
        self._started = self._moved = self._advanced = time.monotonic()
        self._used, self._progress, self._before_s = (0.0, -1), -1, 0.0

    def read(self) -> bool:
        """Pass on what the fork tells; False once it tells nothing any more."""
        chunk = os.read(self.reading, 65536)
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            message = _message(line)
            is_ours = message is not None and self._done < len(self._jobs)
            if message is None or not is_ours or message["id"] != self._jobs[self._done]["id"]:
                continue  # a plugin wrote to the descriptor
            self._tell(message)
            self._restart()
            self._done += 1
            self._has_failed = bool(message["error"])
        return bool(chunk) and self._done < len(self._jobs)

    def exceeded(self, now: float) -> float:
        """The limit that the current job exceeds, in seconds; 0 for none."""
        is_ready, computed_s, progress = activity(self._worker)
        if is_ready or (computed_s, progress) != self._used:
            self._used, self._moved = (computed_s, progress), now
        if progress != self._progress:
            self._progress, self._advanced, self._before_s = progress, now, computed_s
        job = self._jobs[min(self._done, len(self._jobs) - 1)]
        if now - self._started > job["limit_s"]:
            return float(job["limit_s"])
        stall_s = float(job["stall_s"])
        # One that waits for a processor of a busy machine does not hang.
        has_had_time = not is_ready or computed_s - self._before_s > stall_s / 2
        if 0 < stall_s < now - self._advanced and has_had_time:  # by the clock if nothing tells
            return stall_s
        idle_s = float(job["idle_s"])
        return idle_s if progress >= 0 and now - self._moved > idle_s else 0.0

    def end(self, error: str = "") -> list[list[dict[str, Any]]]:
        """End it and all that it started; returns the group of jobs that are left."""
        left = self._jobs[self._done :]
        is_lost = bool(left) and not self._has_failed  # it went without an answer
        ended = os.waitpid(self.pid, os.WNOHANG)
        deadline = time.monotonic() + (1.0 if is_lost and not error else 0.0)
        while not ended[0] and time.monotonic() < deadline:
            time.sleep(0.01)
            ended = os.waitpid(self.pid, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if not ended[0]:
            os.waitpid(self.pid, 0)
            error = error or "closed its channel without an answer"
        os.close(self.reading)
        if is_lost:
            failed = left.pop(0)
            milliseconds = (time.monotonic() - self._started) * 1000
            result = {"id": failed["id"], "event": "done", "answers": {}, "ms": milliseconds}
            self._tell(result | {"error": error or _death(ended[1], self._printed)})
        self._printed.close()
        return [left] if left else []

    def _tell(self, message: dict[str, Any]) -> None:
        text = json.dumps(message, default=str).encode() + b"\n"
        while text:
            text = text[os.write(self._channel, text) :]


def _guard(jobs: list[dict[str, Any]], channel: int) -> None:
    """In the fork: another one does the jobs, so that one that ends its parent does not end all.
    It asks before each answer whether this process still lives."""
    asks, answers = socket.socketpair()
    worker = os.fork()
    if not worker:
        answers.close()
        _end_with_parent()
        os.write(channel, str(os.getpid()).rjust(_PID_BYTES).encode())
        _work(jobs, channel, asks)
    os.close(channel)
    asks.close()
    ended = (0, 0)
    while not ended[0]:
        if select.select([answers], [], [], _LOOK_S / 2)[0]:
            asked = answers.recv(1)
            if asked:
                answers.send(asked)
            else:
                time.sleep(0.01)  # the other one is ending
        ended = os.waitpid(worker, os.WNOHANG)
    code = os.waitstatus_to_exitcode(ended[1])
    if code == -signal.SIGKILL:
        os._exit(_KILLED)
    if code < 0:  # end as it did
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_with_parent() -> None:
    """Where the system can: a plugin may end the parent, and nobody would end this process."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _is_there(parent: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        parent.send(b"?")
        return bool(parent.recv(1))
    return False


def _work(jobs: list[dict[str, Any]], channel: int, parent: socket.socket) -> None:
    """In the fork: the jobs, up to the first that fails, whose leftovers would blame the next."""
    for job in jobs:
        started = time.perf_counter()
        result: dict[str, Any] = {"id": job["id"], "event": "done", "error": "", "answers": {}}
        try:
            _do(job, result)
            if not _is_there(parent):
                raise RuntimeError(_PATRICIDE)
        except BaseException as error:  # SystemExit of a plugin is a failure of that plugin
            result["error"] = describe(error)
        result["ms"] = (time.perf_counter() - started) * 1000
        text = json.dumps(result, default=str).encode() + b"\n"
        while text:
            text = text[os.write(channel, text) :]
        if result["error"]:
            break
    os._exit(0)


def _message(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.get("event") else None


def activity(pid: int | str) -> tuple[bool, float, int]:
    """Whether a process (or self/task/THREAD) computes or would like to, seconds that it has, and a
    number that grows while it reads files or touches new memory, as every import does and no
    endless loop; -1 where nothing tells."""
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/io") as io:  # noqa: PTH123
            fields = stat.read().rpartition(")")[2].split()
            read = int(io.readline().split()[1])
    except (OSError, ValueError, IndexError):
        return False, 0.0, -1
    if fields[0] == "D":  # waits for a disk
        return False, 0.0, time.monotonic_ns()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return fields[0] == "R", seconds, int(fields[7]) + int(fields[9]) + read


def _death(status: int, printed: Any) -> str:
    """How a fork ended, and the last line that it printed."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        how = _PATRICIDE
    elif code < 0 or code == _KILLED:
        how = f"was killed by signal {signal.Signals(-code if code < 0 else signal.SIGKILL).name}"
    else:
        how = f"ended the process with exit code {code}"
    printed.seek(0, os.SEEK_END)
    printed.seek(max(0, printed.tell() - 4096))
    lines = printed.read().decode(errors="replace").strip().splitlines()
    return f"{how} ({lines[-1][:200]})" if lines else how


def describe(error: BaseException) -> str:
    """One line for an error, even if its own __str__ fails."""
    try:
        text = " ".join(str(error).split())
    except BaseException:
        text = "(its message cannot be printed)"
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def _do(job: dict[str, Any], result: dict[str, Any]) -> None:
    import importlib

    module_name, _, attribute = job["target"].partition(":")
    threads = set(threading.enumerate())
    target: Any = importlib.import_module(module_name)
    _check_threads(threads)
    for part in filter(None, attribute.split(".")):
        target = getattr(target, part)
    contract = getattr(target, "contract", None)
    if isinstance(contract, tuple) and all(isinstance(n, int) for n in contract):
        result["contract"] = list(contract)
    features = getattr(target, "features", ())
    if isinstance(features, frozenset | set | tuple | list):
        result["features"] = sorted(map(str, features))
    if job.get("report"):
        module_name, _, function = job["report"].partition(":")
        result["facts"] = getattr(importlib.import_module(module_name), function)(target)
    for hook in job.get("calls", []):
        function = getattr(target, hook, None)
        if function is None or not hasattr(function, "fastdeploy_impl"):
            continue
        result["answers"][hook] = _ask(function, hook, job.get("question", {}))


def _check_threads(before: set[threading.Thread]) -> None:
    """A new thread that is no daemon would keep the server from ending."""
    deadline = time.monotonic() + 0.3
    while True:
        left = [t.name for t in threading.enumerate() if not t.daemon and t not in before]
        if not left:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"importing it leaves threads running: {', '.join(left)}")
        time.sleep(0.01)


def _ask(function: Any, hook: str, question: dict[str, Any]) -> Any:
    import inspect

    arguments: dict[str, Any] = {}
    if hook == "fd_device_probe":
        from fastdeploy_core.contracts.device import DeviceQuestion

        arguments["question"] = DeviceQuestion(**question)
    wanted = inspect.signature(function).parameters
    return _encode(function(**{k: v for k, v in arguments.items() if k in wanted}))


def _encode(value: Any) -> Any:
    """Candidates as objects that preflight.decode_candidate reads; rows as lists."""
    from fastdeploy_core.contracts.base import Accept, Candidate

    if isinstance(value, Candidate):
        verdict = value.verdict
        is_accept = isinstance(verdict, Accept)
        return {
            "candidate": value.name,
            "accept": is_accept,
            "score": verdict.score if isinstance(verdict, Accept) else 0,
            "text": verdict.note if isinstance(verdict, Accept) else verdict.reason,
            "details": {str(k): str(v) for k, v in value.details.items()},
        }
    if isinstance(value, list | tuple):
        return [_encode(v) for v in value]
    return value


if __name__ == "__main__":
    main()
