"""The in-process request scheduler: bounded, fair, and exact about positions, aborts and pauses."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_core.config import RequestSchedulerConfig
from fastdeploy_core.contracts.scheduler import Capacity, InstanceLoad, RequestScheduler, error_of
from fastdeploy_core.errors import ConfigError, InvalidRequest, QueueFull, Unavailable
from fastdeploy_core.scheduler.local import LocalScheduler
from fastdeploy_core.types import (
    FinishReason,
    RequestOutputDelta,
    SequenceDelta,
    TokenDeltas,
    each_delta,
)
from tests.null_engine import make_request

ROOM = Capacity(num_requests=100, num_free_blocks=10_000, block_size=4, num_tokens=100_000)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make(clock=None, **options):
    return LocalScheduler(RequestSchedulerConfig(**options), clock or Clock())


def ids(requests):
    return [request.request_id for request in requests]


def delta(request, position, finished=False, **fields):
    return RequestOutputDelta(
        request_id=request.request_id,
        attempt=request.attempt,
        position=position,
        sequences=[SequenceDelta(index=0, token_ids=[position])],
        finished=finished,
        **fields,
    )


def test_it_is_a_request_scheduler():
    assert isinstance(make(), RequestScheduler)


def test_requests_come_out_in_order_and_results_go_back():
    scheduler = make()
    assert scheduler.put_requests([make_request(n, [5]) for n in "abc"]) == [None] * 3
    taken = scheduler.get_requests(ROOM)
    assert ids(taken) == ["a", "b", "c"] and {r.attempt for r in taken} == {0}
    scheduler.put_results([delta(taken[0], 0), delta(taken[0], 1, finished=True)])
    assert [d.position for d in scheduler.get_results()] == [0, 1]
    assert scheduler.get_results() == []


def test_full_queue_refuses_one_request_and_keeps_the_others():
    scheduler = make(max_size=2)
    answers = scheduler.put_requests([make_request(n, [5]) for n in "abc"])
    assert answers[:2] == [None, None] and answers[2].startswith("queue full: 2 requests wait")
    scheduler.get_requests(ROOM)
    assert scheduler.put_requests([make_request("c", [5])]) == [None]


def test_queue_is_bounded_in_tokens_but_takes_one_request_of_any_size():
    scheduler = make(max_tokens=10)
    assert scheduler.put_requests([make_request("big", [5] * 50)]) == [None]
    (refused,) = scheduler.put_requests([make_request("small", [5])])
    assert refused.startswith("queue full: with this one 51 prompt tokens")


def test_a_reason_becomes_the_error_that_a_client_gets():
    scheduler = make(max_size=1)
    first, second = make_request("a", [1]), make_request("b", [1])
    assert scheduler.put_requests([first]) == [None]
    reasons = scheduler.put_requests([first, second])
    scheduler.close()
    errors = [error_of(reason) for reason in reasons + scheduler.put_requests([second])]
    assert [type(error) for error in errors] == [InvalidRequest, QueueFull, Unavailable]
    assert str(errors[2]) == "the server is shutting down"


def test_duplicate_is_refused_until_the_first_is_answered():
    scheduler = make()
    scheduler.put_requests([make_request("a", [5])])
    (refused,) = scheduler.put_requests([make_request("a", [6])])
    assert refused.startswith("duplicate request id")
    (taken,) = scheduler.get_requests(ROOM)
    scheduler.put_results([delta(taken, 0, finished=True)])
    assert scheduler.put_requests([make_request("a", [5])]) == [None]


def test_nothing_overtakes_a_request_that_does_not_fit():
    scheduler = make()
    scheduler.put_requests([make_request("big", [5] * 40), make_request("small", [5])])
    tight = Capacity(num_requests=5, num_free_blocks=100, block_size=4, num_tokens=39)
    assert scheduler.get_requests(tight) == []
    few = Capacity(num_requests=5, num_free_blocks=0, block_size=4, num_tokens=40)
    assert ids(scheduler.get_requests(few)) == ["big"]


def test_smaller_priorities_go_first_and_tenants_take_turns():
    scheduler = make()
    flood = [make_request(f"a{i}", [5] * 4, tenant="a") for i in range(4)]
    others = [make_request("b0", [5] * 4, tenant="b"), make_request("urgent", [5], priority=-1)]
    scheduler.put_requests([*flood, *others])
    assert ids(scheduler.get_requests(ROOM)) == ["urgent", "a0", "b0", "a1", "a2", "a3"]


def test_a_full_engine_takes_requests_of_tenants_of_whom_it_has_none():
    scheduler = make()
    scheduler.put_requests([make_request(f"a{i}", [5], tenant="a") for i in range(4)])
    one = Capacity(num_requests=1, num_free_blocks=100, block_size=4, num_tokens=100, num_tenants=1)
    full = replace(one, num_requests=0)
    (first,) = scheduler.get_requests(one)
    assert first.request_id == "a0" and scheduler.get_requests(full) == []
    crowd = [make_request(f"{t}{i}", [5], tenant=t) for t in "bc" for i in range(2)]
    scheduler.put_requests(crowd)
    assert scheduler.get_requests(replace(full, num_tenants=0)) == []
    (other,) = scheduler.get_requests(full)
    assert other.request_id == "b0"
    assert ids(scheduler.get_requests(full)) == ["c0"] and scheduler.get_requests(full) == []
    scheduler.put_results([delta(other, 0, finished=True)])
    assert ids(scheduler.get_requests(full)) == ["b1"]


def test_every_request_that_waits_too_long_is_answered():
    clock = Clock()
    scheduler = make(clock, ttl_s=10)
    scheduler.put_requests([make_request(n, [5]) for n in "abc"])
    clock.now += 5
    scheduler.put_requests([make_request("d", [5])])
    clock.now += 6
    late = scheduler.get_results()
    assert [(d.request_id, d.error_type, d.finished) for d in late] == [
        (n, "RequestTimeout", True) for n in "abc"
    ]
    assert ids(scheduler.get_requests(ROOM)) == ["d"]


def test_deadline_counts_the_time_in_the_queue():
    clock = Clock()
    scheduler = make(clock)
    scheduler.put_requests(
        [make_request("a", [5], deadline_s=3), make_request("b", [5], deadline_s=9)]
    )
    clock.now += 4
    assert [d.error_type for d in scheduler.get_results()] == ["RequestTimeout"]
    (taken,) = scheduler.get_requests(ROOM)
    assert taken.deadline_s == pytest.approx(5)


def test_time_in_the_queue_is_added_to_what_the_engine_measured():
    clock = Clock()
    scheduler = make(clock)
    scheduler.put_requests([make_request("a", [5])])
    clock.now += 2
    (taken,) = scheduler.get_requests(ROOM)
    scheduler.put_results([delta(taken, 0, queue_s=0.5)])
    assert scheduler.get_results()[0].queue_s == pytest.approx(2.5)


def test_repeated_delta_is_dropped_and_a_gap_fails_the_request():
    scheduler = make()
    scheduler.put_requests([make_request("a", [5])])
    (taken,) = scheduler.get_requests(ROOM)
    scheduler.put_results([delta(taken, 0), delta(taken, 0), delta(taken, 1)])
    assert [d.position for d in scheduler.get_results()] == [0, 1]
    scheduler.put_results([delta(taken, 3)])
    (end,) = scheduler.get_results()
    assert end.finished and "lost between deltas 2 and 3" in end.error and end.position == 2
    assert scheduler.get_aborts() == ["a"]
    scheduler.put_results([delta(taken, 2)])
    assert scheduler.get_results() == []


def test_tokens_in_columns_pass_as_they_are_unless_one_is_unexpected():
    scheduler = make()
    scheduler.put_requests([make_request(n, [5]) for n in "ab"])
    scheduler.get_requests(ROOM)
    first = TokenDeltas(["a", "b"], [0, 0], [0, 0], [7, 8])
    scheduler.put_results([first])
    assert scheduler.get_results() == [first]
    scheduler.abort(["a"])
    scheduler.put_results([TokenDeltas(["a", "b"], [1, 1], [0, 0], [7, 9])])
    end, rest = scheduler.get_results()
    assert end.request_id == "a" and end.finished and end.position == 1
    assert rest.request_id == "b" and rest.position == 1 and rest.sequences[0].token_ids == [9]
    scheduler.put_results([TokenDeltas(["b"], [3], [0], [9])])
    (gap,) = scheduler.get_results()
    assert gap.request_id == "b" and "lost between deltas 2 and 3" in gap.error


def test_abort_of_a_queued_request_is_answered_once():
    scheduler = make()
    scheduler.put_requests([make_request("a", [5], n=2, temperature=1.0)])
    scheduler.abort(["a", "a"])
    (end,) = scheduler.get_results()
    assert end.finished and [s.finish_reason for s in end.sequences] == [FinishReason.ABORT] * 2
    assert scheduler.get_requests(ROOM) == [] and scheduler.get_aborts() == []


def test_abort_of_a_running_request_reaches_the_engine():
    scheduler = make()
    scheduler.put_requests([make_request("a", [5])])
    (taken,) = scheduler.get_requests(ROOM)
    scheduler.put_results([delta(taken, 0)])
    scheduler.abort(["a"])
    assert scheduler.get_aborts() == ["a"] and scheduler.get_aborts() == []
    scheduler.put_results([delta(taken, 1)])
    assert [(d.position, d.finished) for d in scheduler.get_results()] == [(0, False), (1, True)]


def test_abort_that_comes_first_cancels_its_request():
    scheduler = make()
    scheduler.abort(["a"])
    assert scheduler.put_requests([make_request("a", [5])]) == [None]
    assert scheduler.get_requests(ROOM) == []
    assert [d.finished for d in scheduler.get_results()] == [True]


def test_early_aborts_are_bounded_and_forgotten():
    clock = Clock()
    scheduler = make(clock)
    scheduler.abort([f"x{i}" for i in range(10_000)])
    assert len(scheduler._early_aborts) <= 4096
    clock.now += 120
    scheduler.put_requests([make_request("x9999", [5])])
    assert ids(scheduler.get_requests(ROOM)) == ["x9999"]


def test_a_pause_of_the_process_loses_no_request():
    clock = Clock()
    scheduler = make(clock)
    scheduler.put_requests([make_request(n, [5]) for n in "ab"])
    shown, silent = scheduler.get_requests(ROOM)
    scheduler.put_results([delta(shown, 0)])
    scheduler.put_requests([make_request("c", [5])])
    clock.now += 600  # nobody could report meanwhile: the engine is in this process
    assert ids(scheduler.get_requests(ROOM)) == ["c"]
    assert scheduler.get_aborts() == []
    scheduler.put_results([delta(shown, 1, finished=True), delta(silent, 0, finished=True)])
    found = [(d.request_id, d.position, d.error) for d in scheduler.get_results()]
    assert found == [("a", 0, None), ("a", 1, None), ("b", 0, None)]


def test_an_id_in_use_again_waits_until_the_engine_has_heard_of_its_abort():
    scheduler = make()
    scheduler.put_requests([make_request("a", [5])])
    scheduler.get_requests(ROOM)
    scheduler.abort(["a"])
    assert [d.finished for d in scheduler.get_results()] == [True]
    assert scheduler.put_requests([make_request("a", [6])]) == [None]
    assert scheduler.get_requests(ROOM) == []
    assert scheduler.get_aborts() == ["a"]
    assert [r.prompt_token_ids for r in scheduler.get_requests(ROOM)] == [[6]]


def test_the_last_report_of_load_is_kept_with_its_age():
    clock = Clock()
    scheduler = make(clock)
    for num_running in (2, 3):
        scheduler.report_load(InstanceLoad("me", epoch=1, num_running=num_running))
        clock.now += 4
    assert [(x.num_running, x.age_s) for x in scheduler.loads()] == [(3, 4.0)]


def test_options_that_it_does_not_have_are_refused():
    with pytest.raises(ConfigError, match=r"'local' has no options, got host; .*--scheduler-name"):
        make(options={"host": "h"})


def test_close_answers_everybody_and_wakes_who_waits():
    scheduler = LocalScheduler(RequestSchedulerConfig())
    scheduler.put_requests([make_request(n, [5]) for n in "ab"])
    scheduler.get_requests(Capacity(1, 100, 4, 100))
    waiter = threading.Thread(target=scheduler.get_results, args=(600.0,))
    scheduler.close()
    assert sorted(d.request_id for d in scheduler.get_results()) == ["a", "b"]
    waiter.start()
    waiter.join(60)
    assert not waiter.is_alive()
    assert scheduler.put_requests([make_request("c", [5])])[0] is not None


def test_waiting_getter_is_woken_by_a_request():
    scheduler = LocalScheduler(RequestSchedulerConfig())
    found = []
    getter = threading.Thread(target=lambda: found.extend(scheduler.get_requests(ROOM, 600.0)))
    getter.start()
    scheduler.put_requests([make_request("a", [5])])
    getter.join(60)
    assert ids(found) == ["a"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "result", "finish", "abort", "wait"]),
            st.integers(0, 7),
        ),
        max_size=60,
    )
)
def test_every_accepted_request_is_answered_exactly_once(operations):
    """Whatever happens, in whatever order: conservation of requests, positions without gaps."""
    clock = Clock()
    scheduler = make(clock, max_size=4, ttl_s=20)
    accepted, refused, taken = 0, 0, {}
    ends: dict[str, int] = {}
    positions: dict[str, int] = {}
    generation = dict.fromkeys(range(8), 0)

    def collect():
        for d in each_delta(scheduler.get_results()):
            assert d.position == positions.get(d.request_id, 0)
            positions[d.request_id] = d.position + 1
            if d.finished:
                ends[d.request_id] = ends.get(d.request_id, 0) + 1

    for operation, number in operations:
        name = f"r{number}.{generation[number]}"
        if operation == "put":
            answer = scheduler.put_requests([make_request(name, [5, 6])])[0]
            accepted += answer is None
            refused += answer is not None
        elif operation == "get":
            for request in scheduler.get_requests(Capacity(number, 100, 4, 1000)):
                taken[request.request_id] = [request, 0]
        elif operation in ("result", "finish") and name in taken:
            request, position = taken[name]
            output = delta(request, position, finished=operation == "finish")
            if operation == "result" and number % 2:
                output = TokenDeltas([name], [position], [request.attempt], [position])
            scheduler.put_results([output])
            taken[name][1] += 1
            if operation == "finish":
                del taken[name]
        elif operation == "abort":
            scheduler.abort([name])
        elif operation == "wait":
            clock.now += number
        collect()
        if name in ends:
            generation[number] += 1
    scheduler.close()
    collect()
    assert sum(ends.values()) == accepted and all(count == 1 for count in ends.values())
    assert not scheduler._entries and scheduler.num_queued == 0
    assert scheduler._num_queued_tokens == 0
