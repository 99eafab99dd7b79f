"""Imports third-party plugins in a child process with a time limit, before this process does.

One child does all jobs until one fails, hangs or kills it; a new child does the rest. So a plugin
that hangs, calls os._exit or crashes the interpreter costs a warning, not the server. What passed
is then imported normally: plugins are trusted code all the same.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from fastdeploy_core.contracts.base import Accept, Candidate, Decline

logger = logging.getLogger(__name__)

_CHILD: Final = Path(__file__).with_name("preflight_child.py")
_START_LIMIT_S: Final = 20.0  # for starting the child's interpreter on a very busy machine


@dataclass(frozen=True, slots=True)
class Job:
    """Import `target` ("module" or "module:attribute"), then call the hooks named in `calls`."""

    target: str
    limit_s: float
    calls: tuple[str, ...] = ()
    question: dict[str, Any] = field(default_factory=dict)
    describe: bool = False  # also report what the target declares


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job. `error` is one line, empty on success."""

    error: str
    milliseconds: float
    contract: tuple[int, ...] | None = None
    features: frozenset[str] = frozenset()  # of a driver of layers
    answers: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def run(jobs: Sequence[Job]) -> list[Outcome]:
    """Outcomes in the order of `jobs`; a plugin's errors never raise here."""
    outcomes: dict[int, Outcome] = {}
    remaining = list(range(len(jobs)))
    while remaining:
        finished = _run_child(jobs, remaining)
        outcomes.update(finished)
        remaining = [i for i in remaining if i not in outcomes]
    return [outcomes[i] for i in range(len(jobs))]


def decode_candidate(value: Any) -> Candidate | None:
    """The candidate that the child encoded; None for any other value."""
    if not isinstance(value, dict) or "candidate" not in value:
        return None
    verdict = (
        Accept(int(value["score"]), str(value["text"]))
        if value["accept"]
        else Decline(str(value["text"]))
    )
    return Candidate(str(value["candidate"]), verdict, dict(value["details"]))


def _run_child(jobs: Sequence[Job], indices: Sequence[int]) -> dict[int, Outcome]:
    """Run jobs until all are done or one fails; at least one outcome returns."""
    order = {
        "sys_path": sys.path,
        "jobs": [
            {
                "id": i,
                "target": jobs[i].target,
                "calls": jobs[i].calls,
                "question": jobs[i].question,
                "describe": jobs[i].describe,
            }
            for i in indices
        ],
    }
    outcomes: dict[int, Outcome] = {}
    # Files instead of pipes: a plugin that prints much, or a long list of jobs, must not block.
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as errors,
        _child(stdin, errors, order) as (child, channel),
    ):
        current, clock = indices[0], _Clock(jobs[indices[0]].limit_s + _START_LIMIT_S)
        for line in _lines(channel, clock):
            if line is None:
                outcomes[current] = Outcome(
                    f"did not finish within {jobs[current].limit_s:g} s", clock.elapsed_s * 1000
                )
                return outcomes
            message = _message(line)
            if message is None:
                continue
            if message["event"] == "start":
                current = message["id"]
                clock.restart(jobs[current].limit_s)
            else:
                outcomes[message["id"]] = _outcome(message)
                clock.restart(_START_LIMIT_S)
        failed = current in outcomes and outcomes[current].error
        if len(outcomes) < len(indices) and not failed:
            outcomes[current] = Outcome(_death(child, errors), clock.elapsed_s * 1000)
    return outcomes


class _Clock:
    """Time since the last restart, compared with a limit."""

    def __init__(self, limit_s: float) -> None:
        self.restart(limit_s)

    def restart(self, limit_s: float) -> None:
        self._started, self._limit_s = time.monotonic(), limit_s

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._limit_s - self.elapsed_s)


def _message(line: bytes) -> dict[str, Any] | None:
    """A message of the child; None for a line that a plugin wrote to the descriptor."""
    try:
        message = json.loads(line)
        return message if isinstance(message, dict) and message.get("event") else None
    except ValueError:
        return None


def _outcome(message: dict[str, Any]) -> Outcome:
    contract = message.get("contract")
    return Outcome(
        error=message["error"],
        milliseconds=message["ms"],
        contract=tuple(contract) if contract else None,
        features=frozenset(message.get("features", ())),
        answers=message["answers"],
        facts=message.get("facts", {}),
    )


@contextlib.contextmanager
def _child(
    stdin: IO[bytes], errors: IO[bytes], order: dict[str, Any]
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A context with the child and the reading end of its channel; it ends the child."""
    stdin.write(json.dumps(order).encode())
    stdin.seek(0)
    reading, writing = os.pipe()
    child: subprocess.Popen[bytes] | None = None
    try:
        # A session of its own, so that processes that a plugin starts are ended with the child.
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and script
            [sys.executable, "-P", str(_CHILD), str(writing)],
            stdin=stdin,
            stdout=errors,
            stderr=errors,
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        writing = -1
        yield child, reading
    finally:
        if writing >= 0:
            os.close(writing)
        os.close(reading)
        if child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _lines(channel: int, clock: _Clock) -> Iterator[bytes | None]:
    """Complete lines until end of file; None once the time is up."""
    buffer = b""
    while True:
        ready, _, _ = select.select([channel], [], [], clock.remaining_s)
        if not ready:
            yield None
            return
        chunk = os.read(channel, 65536)
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        yield from lines


def _death(child: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """How the child ended, and the last line that it printed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)
    code = child.poll()
    if code is None:
        how = "closed its channel without an answer"
    elif code < 0:
        how = f"was killed by signal {signal.Signals(-code).name}"
    else:
        how = f"ended the process with exit code {code}"
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 4096))
    printed = errors.read().decode(errors="replace").strip().splitlines()
    return f"{how} ({printed[-1][:200]})" if printed else how
