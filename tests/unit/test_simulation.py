"""Lives on a virtual clock: none breaks a promise, and each kind of bug is found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastdeploy_core.engine.client import AsyncEngine
from fastdeploy_core.engine.processes import egress
from fastdeploy_core.engine.processes.egress import Egress, Routes
from fastdeploy_core.engine.processes.engine_process import EngineProcess
from fastdeploy_core.engine.stream import OutputStream
from fastdeploy_core.kvcache.blocks import BlockPool
from fastdeploy_core.scheduler.batch import BatchScheduler
from fastdeploy_core.scheduler.fair_queue import FairQueue
from fastdeploy_core.scheduler.local import LocalScheduler
from tests import simulation

SOME, ALL = 40, 10_000
ENOUGH = 2000  # seeds until a planted bug is found


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Thousands of injected failures need not be logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_no_life_breaks_a_promise() -> None:
    for seed in range(SOME):
        simulation.live(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_life_of_many_breaks_a_promise() -> None:
    for seed in range(ALL):
        simulation.live(seed)


def test_the_same_seed_is_the_same_life() -> None:
    for seed in range(5):
        first, second = simulation.live(seed), simulation.live(seed)
        assert [(a.tokens, str(a.error), a.ended_s) for a in first.asked] == [
            (a.tokens, str(a.error), a.ended_s) for a in second.asked
        ]


# -- planted bugs: each replaces one method; `real` is what it replaces ---------------------------

Real = Callable[..., Any]


def repeats_are_delivered(real: Real, self: Any, delta: Any, num_deltas: int = 1) -> Any:
    if delta.position < self._position:
        self._position = delta.position
    return real(self, delta, num_deltas)


def gaps_are_overlooked(real: Real, self: Any, delta: Any, num_deltas: int = 1) -> Any:
    self._position = max(self._position, delta.position)
    return real(self, delta, num_deltas)


def lost_engines_are_overlooked(real: Real, self: Any) -> None:
    """Streams of a dead engine wait for ever."""


def output_runs_again(real: Real, self: Any, request_id: str) -> Any:
    self._streams[request_id]._position = 0
    return real(self, request_id)


def lost_requests_run_for_ever(real: Real, self: Any, request_id: str) -> Any:
    self._streams[request_id].is_repeated = False
    return real(self, request_id)


def late_output_counts_for_the_next_attempt(real: Real, self: Any, request_id: str) -> Any:
    before = self._streams[request_id].request
    kept = real(self, request_id)
    self._streams[request_id].request = before
    return kept


def lost_requests_are_failed(real: Real, self: Any, request_id: str) -> bool:
    return False


def lost_requests_forget_their_deadline(real: Real, self: Any, stream: Any) -> None:
    stream.began_s = self._loop.time()
    stream.request.deadline_s = stream.request.deadline_s and 30.0
    real(self, stream)


def clients_that_leave_are_not_reported(real: Real, self: Any, request_ids: Any) -> None:
    """Their requests run on."""


def aborts_in_the_queue_are_dropped(real: Real, self: Any, request_ids: Any) -> None:
    real(self, [n for n in request_ids if n not in self._entries or not self._entries[n].is_queued])


def aborts_of_running_requests_are_dropped(real: Real, self: Any) -> list[str]:
    real(self)
    return []


def early_aborts_are_forgotten(real: Real, self: Any, request: Any) -> Any:
    self._early_aborts.clear()
    return real(self, request)


def queued_requests_never_expire(real: Real, self: Any) -> None:
    """Deadlines of those that wait are not kept."""


def answered_requests_are_kept(real: Real, self: Any, entry: Any) -> None:
    self._queue.depart(entry.request.tenant)


def tenants_never_leave(real: Real, self: Any, tenant: str) -> None:
    """They count as active for ever."""


def owners_are_kept(real: Real, self: Any, request_id: str) -> None:
    """Who asked for a request is never forgotten."""


def dead_front_ends_are_overlooked(real: Real, self: Any, front_end: int) -> list[str]:
    return []


def refusals_are_not_sent(real: Real, self: Any, request: Any) -> None:
    real(self, request)


def repeated_puts_take_the_route_away(real: Real, self: Any, *added: Any) -> bool:
    real(self, *added)
    return True


def output_is_joined_in_the_wrong_order(real: Real, outputs: Any) -> Any:
    return real(list(outputs)[::-1])


def output_goes_to_the_first_front_end(real: Real, self: Any, front_end: int, data: bytes) -> None:
    real(self, 0, data)


def blocks_are_not_given_back(real: Real, self: Any, blocks: Any) -> Any:
    return real(self, list(blocks)[:-1])


def ended_requests_stay_in_the_batch(real: Real, self: Any, request_ids: Any) -> None:
    """The batch scheduler does not hear of aborts."""


BUGS: list[tuple[Any, str, Callable[..., Any]]] = [
    (OutputStream, "put", repeats_are_delivered),
    (OutputStream, "put", gaps_are_overlooked),
    (AsyncEngine, "_on_down", lost_engines_are_overlooked),
    (AsyncEngine, "_keep", output_runs_again),
    (AsyncEngine, "_keep", lost_requests_run_for_ever),
    (AsyncEngine, "_keep", late_output_counts_for_the_next_attempt),
    (AsyncEngine, "_keep", lost_requests_are_failed),
    (AsyncEngine, "_run_again", lost_requests_forget_their_deadline),
    (AsyncEngine, "_abort_in_engine", clients_that_leave_are_not_reported),
    (LocalScheduler, "abort", aborts_in_the_queue_are_dropped),
    (LocalScheduler, "get_aborts", aborts_of_running_requests_are_dropped),
    (LocalScheduler, "_put", early_aborts_are_forgotten),
    (LocalScheduler, "_sweep", queued_requests_never_expire),
    (LocalScheduler, "_forget", answered_requests_are_kept),
    (FairQueue, "depart", tenants_never_leave),
    (Routes, "remove", owners_are_kept),
    (Routes, "remove_all", dead_front_ends_are_overlooked),
    (Routes, "add", repeated_puts_take_the_route_away),
    (EngineProcess, "_queue", refusals_are_not_sent),
    (egress, "joined", output_is_joined_in_the_wrong_order),
    (Egress, "_send", output_goes_to_the_first_front_end),
    (BlockPool, "release", blocks_are_not_given_back),
    (BatchScheduler, "abort", ended_requests_stay_in_the_batch),
]


# Seen only when several things come together, so they take tens or hundreds of lives.
RARE = (
    late_output_counts_for_the_next_attempt,
    lost_requests_forget_their_deadline,
    queued_requests_never_expire,
    aborts_in_the_queue_are_dropped,
    early_aborts_are_forgotten,
    dead_front_ends_are_overlooked,
    repeated_puts_take_the_route_away,
)


def planted() -> Iterator[Any]:
    """Each bug as parameters of a test."""
    for owner, name, bug in BUGS:
        marks = [pytest.mark.slow] if bug in RARE else []
        yield pytest.param(owner, name, bug, id=bug.__name__, marks=marks)


@pytest.mark.parametrize(("owner", "name", "bug"), [*planted()])
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bug: Callable[..., Any]
) -> None:
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: bug(real, *given, **named))
    for seed in range(ENOUGH):
        try:
            simulation.live(seed)
        except Exception:  # a promise, or an assertion of the code itself
            monkeypatch.undo()
            simulation.live(seed)  # it is the bug that was found
            return
    pytest.fail(f"{ENOUGH} lives with this bug kept every promise")
