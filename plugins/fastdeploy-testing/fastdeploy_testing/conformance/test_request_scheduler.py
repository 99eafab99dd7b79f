"""A request scheduler: no request is lost, doubled or answered twice, even if a process dies."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastdeploy_core.config import RequestSchedulerConfig
from fastdeploy_core.contracts.scheduler import Capacity, InstanceLoad
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.types import (
    Request,
    RequestOutputDelta,
    SamplingParams,
    TokenDeltas,
    branch_id,
    each_delta,
)

from .base import Conformance, wait_until
from .scheduler_side import PLENTY, delta, request

Maker = Callable[..., Any]


class RequestSchedulerConformance(Conformance):
    """Front end and engine are threads or further objects of this process."""

    kind = "scheduler"
    # Seconds; drivers with slow round trips override both. lease_s is for tests in which a lease
    # ends; in the others none does, however long the machine stands still.
    lease_s = 1.0
    patience_s = 20.0

    @pytest.fixture
    def make(self, driver: Any, fd_options: dict[str, str]) -> Iterator[Maker]:
        """make(instance="a", max_size=...) opens a scheduler; all are closed at the end. Objects of
        one test with the same lease share a queue where the driver can do that."""
        opened: list[Any] = []
        options: dict[str, str] = {}
        if driver.capabilities.shared_queue:
            options["topic"] = f"check-{random.getrandbits(64):016x}"
        options.update(fd_options)

        def open_one(**settings: Any) -> Any:
            values: dict[str, Any] = {
                "name": driver.name,
                "lease_s": 20 * self.patience_s,
                "options": options or None,
                **settings,
            }
            if "topic" in options:
                values["options"] = {**options, "topic": f"{options['topic']}-{values['lease_s']}"}
            scheduler = driver(RequestSchedulerConfig(**values))
            opened.append(scheduler)
            return scheduler

        yield open_one
        for scheduler in opened:
            scheduler.close()
            scheduler.close()  # a second call has no effect

    def take(self, scheduler: Any, count: int, capacity: Capacity = PLENTY) -> list[Request]:
        """Get until `count` requests have come, or until a time limit."""
        taken: list[Request] = scheduler.get_requests(capacity, 0.05)
        deadline = time.monotonic() + self.patience_s
        while len(taken) < count and time.monotonic() < deadline:
            taken += scheduler.get_requests(capacity, 0.05)
        return taken

    def collect(self, scheduler: Any, count: int) -> list[RequestOutputDelta]:
        """Get until `count` deltas have come, or until a time limit."""
        deltas: list[RequestOutputDelta] = [*each_delta(scheduler.get_results(0.05))]
        deadline = time.monotonic() + self.patience_s
        while len(deltas) < count and time.monotonic() < deadline:
            deltas += each_delta(scheduler.get_results(0.05))
        return deltas

    def running(self, make: Maker) -> tuple[Any, Request]:
        """A scheduler whose only request `r` was taken by an engine."""
        scheduler = make()
        scheduler.put_requests([request("r")])
        return scheduler, self.take(scheduler, 1)[0]

    def aborts(self, scheduler: Any) -> list[str]:
        """Get until there is something to abort, or until a time limit."""
        aborts: list[str] = scheduler.get_aborts()
        deadline = time.monotonic() + self.patience_s
        while not aborts and time.monotonic() < deadline:
            aborts += scheduler.get_aborts()
        return aborts

    def leases(self) -> list[float]:
        """What a test in which one instance has to keep its lease tries in turn: a machine may
        stand still for longer than a lease."""
        return [self.lease_s, 4 * self.lease_s, 16 * self.lease_s]

    def assert_quiet(self, scheduler: Any) -> None:
        """Neither requests nor results arrive."""
        for _ in range(3):
            assert scheduler.get_requests(PLENTY, 0.02) == []
            assert scheduler.get_results(0.02) == []

    def test_unknown_options_are_refused_by_name(
        self, driver: Any, fd_options: dict[str, str]
    ) -> None:
        options = {**fd_options, "no_such_option": "1"}
        with pytest.raises(ConfigError, match="no_such_option"):
            driver(RequestSchedulerConfig(name=driver.name, options=options)).close()

    def test_empty_scheduler_gives_nothing_within_its_timeout(self, make: Maker) -> None:
        scheduler = make()
        started = time.monotonic()
        assert scheduler.get_requests(PLENTY, 0.0) == []
        assert scheduler.get_results(0.0) == []
        assert scheduler.get_requests(PLENTY, 0.1) == []
        assert scheduler.get_aborts() == []
        assert time.monotonic() - started < self.patience_s

    def test_requests_come_once_and_in_order(self, make: Maker) -> None:
        scheduler = make()
        names = [f"r{i}" for i in range(20)]
        assert scheduler.put_requests([request(n) for n in names]) == [None] * 20
        assert [r.request_id for r in self.take(scheduler, 20)] == names
        self.assert_quiet(scheduler)

    def test_request_arrives_as_it_was_sent(self, make: Maker) -> None:
        scheduler = make()
        sent = request("whole", tokens=100)
        sent.sampling = SamplingParams(temperature=0.5, seed=2**60, stop=["x"], max_tokens=7)
        sent.cache_salt, sent.grammar, sent.eos_token_ids = "salt", b"\x00\xff", [2, 3]
        scheduler.put_requests([sent])
        got = self.take(scheduler, 1)[0]
        got.attempt = sent.attempt
        got.instance = sent.instance
        assert got == sent

    def test_capacity_is_respected(self, make: Maker) -> None:
        scheduler = make()
        scheduler.put_requests([request(f"r{i}") for i in range(10)])
        three = Capacity(3, 10**6, 64, 10**9)
        first = scheduler.get_requests(three, self.patience_s)
        assert 1 <= len(first) <= 3
        assert scheduler.get_requests(Capacity(0, 10**6, 64, 10**9), 0.02) == []
        rest = self.take(scheduler, 10 - len(first), three)
        names = [r.request_id for r in [*first, *rest]]
        assert names == [f"r{i}" for i in range(10)]

    def test_smaller_priority_goes_first(self, make: Maker) -> None:
        scheduler = make()
        order = [("late", 5), ("a", 1), ("soon", -3), ("b", 1)]
        scheduler.put_requests([request(name, priority=p) for name, p in order])
        taken = [r.request_id for r in self.take(scheduler, 4)]
        assert taken == ["soon", "a", "b", "late"]

    def test_duplicate_id_is_refused_and_the_first_lives(self, make: Maker) -> None:
        scheduler = make()
        answers = scheduler.put_requests([request("same"), request("same"), request("other")])
        assert answers[0] is None and answers[2] is None
        assert answers[1] and "duplicate" in answers[1]
        again = scheduler.put_requests([request("same")])[0]
        assert again and "duplicate" in again
        assert sorted(r.request_id for r in self.take(scheduler, 2)) == ["other", "same"]
        self.assert_quiet(scheduler)

    def test_full_queue_refuses_one_by_one(self, make: Maker) -> None:
        scheduler = make(max_size=3)
        answers = scheduler.put_requests([request(f"r{i}") for i in range(5)])
        assert answers[:3] == [None] * 3
        assert all(a and "full" in a for a in answers[3:])
        assert len(self.take(scheduler, 3)) == 3
        assert scheduler.put_requests([request("r5")]) == [None], "room was made"

    def test_results_come_once_and_in_order(self, make: Maker) -> None:
        scheduler, taken = self.running(make)
        for position in range(5):
            scheduler.put_results([delta(taken, position, finished=position == 4)])
        got = self.collect(scheduler, 5)
        assert [d.position for d in got] == [0, 1, 2, 3, 4]
        assert [d.finished for d in got] == [False] * 4 + [True]
        self.assert_quiet(scheduler)

    def test_tokens_in_columns_are_deltas_in_short(self, make: Maker) -> None:
        scheduler = make()
        scheduler.put_requests([request("r"), request("s")])
        first, second = self.take(scheduler, 2)
        names, attempts = ["r", "s"], [first.attempt, second.attempt]
        # Only entries of a stale attempt, and repeated ones, are dropped.
        scheduler.put_results(
            [TokenDeltas(names, [0, 0], [first.attempt - 1, attempts[1]], [9, 1])]
        )
        scheduler.put_results([TokenDeltas(names, [0, 0], attempts, [2, 9])])
        scheduler.put_results([TokenDeltas(names, [1, 1], attempts, [3, 4, 5, 6], [1, 3])])
        scheduler.put_results([delta(first, 2, finished=True), delta(second, 2, finished=True)])
        got = self.collect(scheduler, 6)
        for taken, expected in ((first, [[2], [3]]), (second, [[1], [4, 5, 6]])):
            mine = [d for d in got if d.request_id == taken.request_id]
            assert [d.position for d in mine] == [0, 1, 2]
            assert [d.sequences[0].token_ids for d in mine[:2]] == expected
        self.assert_quiet(scheduler)

    def test_repeated_deltas_are_shown_once(self, make: Maker) -> None:
        scheduler, taken = self.running(make)
        scheduler.put_results([delta(taken, 0), delta(taken, 0)])
        scheduler.put_results([delta(taken, 0), delta(taken, 1, finished=True)])
        assert [d.position for d in self.collect(scheduler, 2)] == [0, 1]
        self.assert_quiet(scheduler)

    def test_nothing_follows_the_last_delta(self, make: Maker) -> None:
        scheduler, taken = self.running(make)
        scheduler.put_results([delta(taken, 0, finished=True)])
        scheduler.put_results([delta(taken, 1), delta(taken, 1, finished=True)])
        assert len(self.collect(scheduler, 1)) == 1
        self.assert_quiet(scheduler)
        assert scheduler.put_requests([request("r")]) == [None], "the id is free again"

    def test_deltas_of_unknown_requests_and_attempts_are_dropped(self, make: Maker) -> None:
        scheduler = make()
        scheduler.put_results([delta(request("never put"), 0, finished=True)])
        scheduler.put_requests([request("r")])
        taken = self.take(scheduler, 1)[0]
        foreign = delta(taken, 0, finished=True)
        foreign.attempt = taken.attempt - 1
        scheduler.put_results([foreign])
        self.assert_quiet(scheduler)
        scheduler.put_results([delta(taken, 0, finished=True)])
        assert len(self.collect(scheduler, 1)) == 1

    def test_abort_of_a_waiting_request_keeps_it_from_running(self, make: Maker) -> None:
        scheduler = make()
        scheduler.put_requests([request("gone"), request("stays")])
        scheduler.abort(["gone", "unknown"])
        scheduler.abort(["gone"])
        assert [r.request_id for r in self.take(scheduler, 1)] == ["stays"]
        assert scheduler.get_requests(PLENTY, 0.05) == []

    def test_abort_of_a_running_request_reaches_its_engine_once(self, make: Maker) -> None:
        scheduler = make()
        scheduler.put_requests([request("r"), request("s")])
        self.take(scheduler, 2)
        scheduler.abort(["r"])
        scheduler.abort(["r"])
        aborts = self.aborts(scheduler)
        for _ in range(3):
            time.sleep(0.01)
            aborts += scheduler.get_aborts()
        assert aborts == ["r"]

    def test_end_of_a_branch_is_passed_on_and_not_answered(self, make: Maker) -> None:
        scheduler, taken = self.running(make)
        scheduler.put_results([delta(taken, 0)])
        assert len(self.collect(scheduler, 1)) == 1
        scheduler.abort([branch_id("r", 1)])
        aborts = self.aborts(scheduler)
        assert aborts == [branch_id("r", 1)]
        self.assert_quiet(scheduler)
        scheduler.put_results([delta(taken, 1, finished=True)])
        assert [d.finished for d in self.collect(scheduler, 1)] == [True]

    def test_abort_before_its_request_cancels_it(self, make: Maker) -> None:
        scheduler = make()
        scheduler.abort(["early"])
        scheduler.put_requests([request("early"), request("other")])
        assert [r.request_id for r in self.take(scheduler, 1)] == ["other"]
        assert scheduler.get_requests(PLENTY, 0.05) == []

    def test_request_that_waits_too_long_is_answered(self, make: Maker) -> None:
        scheduler = make(ttl_s=0.2)
        scheduler.put_requests([request("old")])
        time.sleep(0.4)
        assert scheduler.get_requests(PLENTY, 0.05) == [], "handed out although its time ran out"
        answer = self.collect(scheduler, 1)
        assert [d.request_id for d in answer] == ["old"]
        assert answer[0].finished and answer[0].error
        assert answer[0].error_type == "RequestTimeout"
        self.assert_quiet(scheduler)

    def test_threads_lose_and_double_nothing(self, make: Maker) -> None:
        scheduler = make(max_size=0)
        total, putters, engines = 200, 4, 3
        taken: list[str] = []
        shown: list[tuple[str, int]] = []
        stop = threading.Event()

        def put(part: int) -> None:
            for i in range(part, total, putters):
                assert scheduler.put_requests([request(f"r{i}")]) == [None]

        def engine() -> None:
            while not stop.is_set():
                for r in scheduler.get_requests(Capacity(5, 10**6, 64, 10**9), 0.01):
                    taken.append(r.request_id)
                    scheduler.put_results([delta(r, 0)])
                    scheduler.put_results([delta(r, 1, finished=True)])

        def front() -> None:
            while not stop.is_set():
                shown.extend((d.request_id, d.position) for d in scheduler.get_results(0.01))

        threads = [threading.Thread(target=put, args=(i,)) for i in range(putters)]
        threads += [threading.Thread(target=engine) for _ in range(engines)]
        threads.append(threading.Thread(target=front))
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 3 * self.patience_s
        while len(shown) < 2 * total and time.monotonic() < deadline:
            time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join()
        assert Counter(taken) == {f"r{i}": 1 for i in range(total)}
        wanted = set(itertools.product((f"r{i}" for i in range(total)), (0, 1)))
        assert Counter(shown) == dict.fromkeys(wanted, 1)

    def test_load_reports_are_seen_with_their_age(self, make: Maker) -> None:
        scheduler = make(instance="a")
        began = time.monotonic()
        scheduler.report_load(InstanceLoad("a", 7, num_running=2, age_s=1e6))
        reported = time.monotonic()
        time.sleep(0.2)
        least = 0.9 * (time.monotonic() - reported)
        loads = scheduler.loads()
        assert [(x.instance, x.epoch, x.num_running) for x in loads] == [("a", 7, 2)]
        assert least <= loads[0].age_s <= 1.1 * (time.monotonic() - began), (
            "the scheduler tells the age of a report by its own clock"
        )
        for num_running in (3, 0):
            scheduler.report_load(InstanceLoad("a", 7, num_running=num_running))
            # It may travel with the next sign of life.
            assert wait_until(
                lambda now=num_running: [x.num_running for x in scheduler.loads()] == [now],
                self.patience_s,
            ), "the newest report counts"

    @pytest.mark.capability("leases")
    def test_what_a_dead_instance_held_is_handed_out_again(self, driver: Any, make: Maker) -> None:
        for lease_s in self.leases():
            front, dead, alive = self._three(driver, make, lease_s)
            front.put_requests([request("r")])
            first = self.take(dead, 1)[0]
            time.sleep(2 * lease_s)  # the dead instance does not report any more
            second, began = self.take(alive, 1)[0], time.monotonic()
            # The dead instance wakes up: its reports are fenced off.
            dead.put_results([delta(first, 0), delta(first, 1, finished=True)])
            alive.put_results([delta(second, 0), delta(second, 1, finished=True)])
            if time.monotonic() - began < lease_s / 2:
                break  # else the living one may have lost it, too
        dead.put_results([delta(first, 2, finished=True)])
        got = self.collect(front, 2)
        assert second.request_id == "r" and second.attempt > first.attempt
        assert [(d.position, d.attempt) for d in got] == [
            (0, second.attempt),
            (1, second.attempt),
        ]
        tokens = [d.sequences[0].token_ids[0] for d in got]
        assert tokens == [1000 * second.attempt, 1000 * second.attempt + 1], "the zombie is heard"
        assert front.get_results(0.1) == []

    @pytest.mark.capability("leases")
    def test_death_in_mid_answer_ends_in_one_answer(self, driver: Any, make: Maker) -> None:
        front, dead, alive = self._three(driver, make, self.lease_s)
        front.put_requests([request("r")])
        first = self.take(dead, 1)[0]
        dead.put_results([delta(first, 0)])
        shown = self.collect(front, 1)
        time.sleep(2 * self.lease_s)
        deadline = time.monotonic() + self.patience_s
        while not any(d.finished for d in shown) and time.monotonic() < deadline:
            for again in alive.get_requests(PLENTY, 0.05):
                alive.put_results([delta(again, p, finished=p == 2) for p in range(3)])
            shown += each_delta(front.get_results(0.05))
        dead.put_results([delta(first, 1), delta(first, 2, finished=True)])
        shown += each_delta(front.get_results(0.1))
        positions = [d.position for d in shown]
        assert positions == sorted(set(positions)), f"positions {positions} repeat or go back"
        assert sum(d.finished for d in shown) == 1
        last = shown[-1]
        assert last.finished and (last.attempt > first.attempt or last.error_type == "WorkerError")

    def _three(self, driver: Any, make: Maker, lease_s: float) -> tuple[Any, Any, Any]:
        """Front end, an instance that will die, one that lives: one object if the driver shares no
        queue."""
        if not driver.capabilities.leases:
            pytest.skip("capabilities.leases is False")
        front = make(instance="front", lease_s=lease_s)
        if not driver.capabilities.shared_queue:
            return front, front, front
        dead, alive = (make(instance=name, lease_s=lease_s) for name in ("dead", "alive"))
        return front, dead, alive

    @pytest.mark.capability("leases")
    def test_heartbeats_keep_a_lease(self, driver: Any, make: Maker) -> None:
        if not driver.capabilities.leases:
            pytest.skip("capabilities.leases is False")
        for lease_s in self.leases():
            scheduler = make(instance="slow", lease_s=lease_s)
            scheduler.put_requests([request("r")])
            last = time.monotonic()
            assert len(self.take(scheduler, 1)) == 1
            until = last + 2.5 * lease_s
            while time.monotonic() < until:
                scheduler.report_load(InstanceLoad("slow", 1, num_running=1))
                again = scheduler.get_requests(PLENTY, 0.0)
                if time.monotonic() - last > lease_s / 2:
                    break  # the heartbeat was late
                last = time.monotonic()
                assert again == [], "a lease ended despite heartbeats"
                time.sleep(lease_s / 20)
            else:
                return
        pytest.skip("this machine is too busy to send a heartbeat in time")

    @pytest.mark.capability("leases")
    def test_new_start_of_an_instance_ends_what_the_old_one_held(
        self, driver: Any, make: Maker
    ) -> None:
        self._need(driver, "leases", "shared_queue")
        front, old = make(instance="front"), make(instance="x", epoch=1)
        front.put_requests([request("r")])
        first = self.take(old, 1)[0]
        new = make(instance="x", epoch=2)  # the lease would last: only the new epoch ends it
        second = self.take(new, 1)
        assert [r.request_id for r in second] == ["r"] and second[0].attempt > first.attempt
        assert front.get_results(0.5) == []  # the front end may hear of it a moment later
        old.put_results([delta(first, 0, finished=True)])
        new.put_results([delta(second[0], 0), delta(second[0], 1, finished=True)])
        got = self.collect(front, 2)
        assert [(d.position, d.attempt) for d in got] == [
            (0, second[0].attempt),
            (1, second[0].attempt),
        ]
        assert front.get_results(0.1) == []

    @pytest.mark.capability("leases")
    def test_closed_instance_gives_back_at_once_and_in_order(
        self, driver: Any, make: Maker
    ) -> None:
        self._need(driver, "leases", "shared_queue")
        front, leaving = make(instance="front"), make(instance="leaving")
        names = [f"r{i}" for i in range(6)]
        front.put_requests([request(n) for n in names])
        three = Capacity(3, 10**6, 64, 10**9)
        held = self.take(leaving, 3, three)
        assert [r.request_id for r in held] == names[:3]
        front.put_requests([request("soon", priority=-1)])
        leaving.close()
        taken = self.take(make(instance="next"), 7)
        assert [r.request_id for r in taken] == ["soon", *names]

    @pytest.mark.capability("shared_queue")
    def test_a_draining_instance_keeps_nothing_that_it_was_not_given(
        self, driver: Any, make: Maker
    ) -> None:
        self._need(driver, "shared_queue")
        front, draining = make(instance="front"), make(instance="draining")
        # Drivers that fetch ahead have a question to answer now, and then requests to spare.
        held = draining.get_requests(PLENTY, 0.0)
        names = [f"r{i}" for i in range(6)]
        front.put_requests([request(n) for n in names])
        time.sleep(0.1)
        other, taken = make(instance="other"), list[str]()
        deadline = time.monotonic() + self.patience_s
        while len(taken) < len(names) and time.monotonic() < deadline:
            draining.report_load(InstanceLoad("draining", 1, draining=True))
            taken += [r.request_id for r in other.get_requests(PLENTY, 0.05)]
        assert held == []
        assert sorted(taken) == names

    @pytest.mark.capability("durable")
    def test_waiting_requests_outlive_who_put_them(self, driver: Any, make: Maker) -> None:
        self._need(driver, "durable", "shared_queue")
        front = make(instance="front")
        assert front.put_requests([request("r"), request("late", priority=1)]) == [None] * 2
        front.close()
        taken = self.take(make(instance="engine"), 2)
        assert [r.request_id for r in taken] == ["r", "late"]

    @pytest.mark.capability("durable")
    def test_an_id_is_put_again_when_its_front_end_is_gone(self, driver: Any, make: Maker) -> None:
        self._need(driver, "durable", "shared_queue", "leases")
        gone, engine = make(instance="gone"), make(instance="engine")
        gone.put_requests([request("r")])
        first = self.take(engine, 1)[0]
        gone.close()
        front = make(instance="front")
        deadline = time.monotonic() + self.patience_s
        while (reason := front.put_requests([request("r")])[0]) and time.monotonic() < deadline:
            assert "duplicate" in reason
            time.sleep(0.05)
        assert reason is None, "the id of a request that nobody waits for stays taken"
        second, stopped = list[Request](), list[str]()
        while not second and time.monotonic() < deadline:
            stopped += engine.get_aborts()
            second += engine.get_requests(PLENTY, 0.05)
        assert second and second[0].attempt > first.attempt
        engine.put_results([delta(first, 0), delta(first, 1, finished=True)])
        engine.put_results([delta(second[0], 0), delta(second[0], 1, finished=True)])
        got = self.collect(front, 2)
        assert [(d.position, d.attempt) for d in got] == [
            (0, second[0].attempt),
            (1, second[0].attempt),
        ]
        assert stopped in ([], ["r"]), "the order to stop comes before the request does"
        assert engine.get_aborts() == []
        assert front.get_results(0.1) == []

    def _need(self, driver: Any, *names: str) -> None:
        for name in names:
            if not getattr(driver.capabilities, name):
                pytest.skip(f"capabilities.{name} is False")

    @pytest.mark.capability("shared_queue")
    def test_full_instance_leaves_requests_to_another(self, driver: Any, make: Maker) -> None:
        if not driver.capabilities.shared_queue:
            pytest.skip("capabilities.shared_queue is False")
        front, full, free = (make(instance=name) for name in ("front", "full", "free"))
        front.put_requests([request("r", tokens=100)])
        assert full.get_requests(Capacity(8, 1, 64, 10**9), 0.1) == []
        assert [r.request_id for r in self.take(free, 1, Capacity(8, 2, 64, 10**9))] == ["r"]

    @pytest.mark.capability("shared_queue")
    def test_two_instances_share_one_queue(self, driver: Any, make: Maker) -> None:
        if not driver.capabilities.shared_queue:
            pytest.skip("capabilities.shared_queue is False")
        front = make(instance="front")
        engines = [make(instance="one"), make(instance="two")]
        names = [f"r{i}" for i in range(30)]
        front.put_requests([request(n) for n in names])
        taken: list[str] = []
        deadline = time.monotonic() + self.patience_s
        while len(taken) < len(names) and time.monotonic() < deadline:
            for engine in engines:
                for r in engine.get_requests(Capacity(3, 10**6, 64, 10**9), 0.02):
                    taken.append(r.request_id)
                    engine.put_results([delta(r, 0, finished=True)])
        assert Counter(taken) == dict.fromkeys(names, 1)
        got = self.collect(front, len(names))
        assert Counter(d.request_id for d in got) == dict.fromkeys(names, 1)


class TestRequestScheduler(RequestSchedulerConformance):
    """Run by `fastdeploy plugins check`."""
