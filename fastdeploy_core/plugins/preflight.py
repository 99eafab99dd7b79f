"""Imports third-party plugins in a child process with a time limit, before this process does.

The child forks, so that plugins are imported side by side and one that hangs, calls os._exit or
crashes the interpreter costs a warning, not the server and not another plugin. What passed is then
imported normally: plugins are trusted code all the same.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, Final

from fastdeploy_core.contracts.base import Accept, Candidate, Decline

logger = logging.getLogger(__name__)

_CHILD: Final = Path(__file__).with_name("preflight_child.py")
# For how long a fork may neither compute nor read; once one has hung, others get less.
_IDLE_S, _IDLE_AGAIN_S = 2.0, 0.5
_START_LIMIT_S: Final = 20.0  # for starting the child's interpreter on a very busy machine


@dataclass(frozen=True, slots=True)
class Job:
    """Import `target` ("module" or "module:attribute"), then call the hooks named in `calls`.

    Neighbours of one `group`, such as the drivers of a distribution, are imported one after the
    other in one process, which imports shared modules once; without a group a job has its own.
    """

    target: str
    limit_s: float
    calls: tuple[str, ...] = ()
    question: dict[str, Any] = field(default_factory=dict)
    stall_s: float = 0.0  # of neither reading files nor touching new memory; 0: see _IDLE_S
    report: str = ""  # "module:function" that is called with the target; see Outcome.facts
    group: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job. `error` is one line, empty on success."""

    error: str
    milliseconds: float
    contract: tuple[int, ...] | None = None
    features: frozenset[str] = frozenset()  # of a driver of layers
    answers: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # what Job.report returned


waiting: dict[str, Job] = {}  # by target: for the next child, because each one costs 0.1 s
outcomes_of: dict[str, Outcome] = {}  # by target: the newest


def run(jobs: Sequence[Job], *, at_once: int = 0) -> list[Outcome]:
    """Outcomes in the order of `jobs`; a plugin's errors never raise here.

    Args:
        at_once: how many groups are imported side by side; 0: as many as there are processors.
    """
    num_asked, jobs = len(jobs), [*jobs, *waiting.values()]
    waiting.clear()
    at_once = at_once or max(2, os.cpu_count() or 1)
    outcomes = _run_child(jobs, range(len(jobs)), at_once)
    for index in range(len(jobs)):
        if index not in outcomes:  # a plugin ended the child itself: each of them alone tells which
            alone = _run_child(jobs, [index], 1)
            outcomes[index] = alone.get(index) or Outcome("ended the process that loads plugins", 0)
    outcomes_of.update((job.target, outcomes[i]) for i, job in enumerate(jobs))
    return [outcomes[i] for i in range(num_asked)]


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


def _run_child(jobs: Sequence[Job], indices: Sequence[int], at_once: int) -> dict[int, Outcome]:
    """The outcomes that one child tells."""
    if not indices:
        return {}
    has_hung = any(o.error and o.milliseconds > 1e3 * _IDLE_S for o in outcomes_of.values())
    idle_s = _IDLE_AGAIN_S if has_hung else _IDLE_S
    by_group = itertools.groupby(indices, key=lambda i: jobs[i].group or i)
    order = {
        "sys_path": sys.path,
        "at_once": at_once,
        "groups": [[_encoded(i, jobs[i], idle_s) for i in group] for _, group in by_group],
    }
    outcomes: dict[int, Outcome] = {}
    longest = max(jobs[i].limit_s for i in indices) + _START_LIMIT_S
    # Files instead of pipes: a plugin that prints much, or a long list of jobs, must not block.
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as errors,
        _child(stdin, errors, order) as channel,
    ):
        for line in _lines(channel, longest):
            message = json.loads(line)
            outcomes[message["id"]] = _outcome(message)
    return outcomes


def _encoded(index: int, job: Job, idle_s: float) -> dict[str, Any]:
    return {
        "idle_s": idle_s,
        "id": index,
        "target": job.target,
        "limit_s": job.limit_s,
        "stall_s": job.stall_s,
        "calls": job.calls,
        "question": job.question,
        "report": job.report,
    }


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
def _child(stdin: IO[bytes], errors: IO[bytes], order: dict[str, Any]) -> Iterator[int]:
    """A context with the reading end of the child's channel; it ends the child."""
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
        yield reading
    finally:
        if writing >= 0:
            os.close(writing)
        os.close(reading)
        if child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _lines(channel: int, limit_s: float) -> Iterator[bytes]:
    """Complete lines until end of file, or until nothing comes for `limit_s`."""
    buffer = b""
    while connection.wait([channel], limit_s):
        chunk = os.read(channel, 65536)
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        yield from lines
