"""What goes wrong between processes and Redis, and that nothing is lost or shown twice by it."""

from __future__ import annotations

import random
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import zmq
from fd_sched_redis import link
from fd_sched_redis.bodies import SEAL_BYTES, Bodies
from fd_sched_redis.cell import Cell, Reach
from fd_sched_redis.local_server import RedisProcess, free_port
from fd_sched_redis.options import read_options
from fd_sched_redis.scheduler import GlobalScheduler, SplitwiseScheduler

from fastdeploy_core.config import RequestSchedulerConfig
from fastdeploy_core.contracts.scheduler import Capacity, InstanceLoad
from fastdeploy_core.types import Request, RequestOutputDelta, TokenDeltas, each_delta
from fastdeploy_testing.conformance.scheduler_side import PLENTY, delta, request

LEASE_S = 1.2  # where leases end; elsewhere they outlast a machine that stands still
LEASES_S = (LEASE_S, 4 * LEASE_S, 16 * LEASE_S)  # in turn, where one instance has to keep its own
PATIENCE_S = 60.0
Maker = Callable[..., GlobalScheduler]


@pytest.fixture
def make() -> Iterator[Maker]:
    """make(server, instance, **options) opens a driver; all are closed at the end."""
    opened: list[GlobalScheduler] = []

    def open_one(
        port: int, instance: str = "", driver: type[Any] = GlobalScheduler, **options: Any
    ) -> Any:
        settings = {"lease_s": options.pop("lease_s", 60.0), "max_size": 0}
        config = RequestSchedulerConfig(
            instance=instance,
            epoch=secrets.randbits(63) if instance else 0,
            options={"port": port, **options},
            **settings,
        )
        opened.append(driver(config))
        return opened[-1]

    yield open_one
    for scheduler in opened:
        scheduler.close()


def take(scheduler: Any, count: int) -> list[Request]:
    taken: list[Request] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(taken) < count and time.monotonic() < deadline:
        taken += scheduler.get_requests(PLENTY, 0.05)
    return taken


def collect(scheduler: Any, count: int, limit_s: float = PATIENCE_S) -> list[RequestOutputDelta]:
    found: list[RequestOutputDelta] = []
    deadline = time.monotonic() + limit_s
    while len(found) < count and time.monotonic() < deadline:
        found += each_delta(scheduler.get_results(0.05))
    return found


class Engine(threading.Thread):
    """An engine that answers what it gets with `num_deltas` deltas, until it is stopped."""

    def __init__(self, scheduler: Any, name: str, num_deltas: int = 2, pause_s: float = 0.0):
        super().__init__(daemon=True)
        self.scheduler, self.instance = scheduler, name
        self.num_deltas, self.pause_s = num_deltas, pause_s
        self.taken: list[str] = []
        self.stopping = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.stopping.is_set():
            self.scheduler.report_load(InstanceLoad(self.instance, 1, num_total_blocks=10**6))
            stopped = set(self.scheduler.get_aborts())
            for got in self.scheduler.get_requests(Capacity(4, 10**6, 64, 10**9), 0.02):
                self.taken.append(got.request_id)
                for position in range(self.num_deltas):
                    if got.request_id in stopped:
                        break
                    last = position == self.num_deltas - 1
                    self.scheduler.put_results([delta(got, position, finished=last)])
                    self.stopping.wait(self.pause_s)

    def stop(self) -> None:
        self.stopping.set()
        self.join()


@pytest.fixture
def serve(make: Maker) -> Iterator[Callable[..., Engine]]:
    """serve(scheduler, name, ...) starts an Engine; all stop at the end, before their drivers."""
    started: list[Engine] = []

    def start(*arguments: Any) -> Engine:
        started.append(Engine(*arguments))
        return started[-1]

    yield start
    for engine in started:
        engine.stopping.set()
    for engine in started:
        engine.join()


class Proxy(threading.Thread):
    """A TCP port in front of Redis that can be cut, silenced, or led to another server."""

    def __init__(self, target: int) -> None:
        super().__init__(daemon=True)
        import socket

        self.target, self.is_silent = target, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[Any] = []
        self.start()

    def run(self) -> None:
        import socket

        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                if self._listener.fileno() < 0:
                    return
                near.close()
                continue
            self._pairs += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: Any, sink: Any) -> None:
        try:
            while data := source.recv(65536):
                while self.is_silent:
                    time.sleep(0.01)
                sink.sendall(data)
        except OSError:
            pass
        source.close()
        sink.close()

    def cut(self) -> None:
        """End all connections."""
        import contextlib
        import socket

        for one in self._pairs:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()


@pytest.fixture
def proxy() -> Iterator[Callable[[int], Proxy]]:
    made: list[Proxy] = []

    def make_one(target: int) -> Proxy:
        made.append(Proxy(target))
        return made[-1]

    yield make_one
    for one in made:
        one.is_silent = False
        one.close()


@pytest.fixture
def port(shared_redis: RedisProcess) -> int:
    shared_redis.client().flushall()
    return shared_redis.port


def leftovers(scheduler: GlobalScheduler, client: redis.Redis) -> list[str]:
    """Keys of requests that the queue still knows."""
    prefix = scheduler.cells[0].prefix
    keys = [key.decode() for key in client.keys("*")]
    return [k for k in keys if k.removeprefix(prefix)[:2] in ("t:", "q", "wait", "own:")]


# -- T2, T4, T6: leases ---------------------------------------------------------------------------


def test_a_worker_paused_past_its_lease_is_stale(make: Maker, port: int) -> None:
    for number, lease_s in enumerate(LEASES_S):
        leases = {"lease_s": lease_s, "topic": f"paused{number}"}
        front = make(port, **leases)
        paused, other = make(port, "paused", **leases), make(port, "other", **leases)
        front.put_requests([request("r")])
        first = take(paused, 1)[0]
        time.sleep(1.5 * lease_s)  # it reports nothing, as in SIGSTOP
        second, began = take(other, 1)[0], time.monotonic()
        assert front.cells[0].complete("r", first.attempt, "finished") == "stale"
        paused.put_results([delta(first, 0, finished=True)])
        assert front.get_results(0.3) == [], "the late answer of a lost attempt was shown"
        other.put_results([delta(second, 0, finished=True)])
        if time.monotonic() - began < lease_s / 2:
            break  # else the other one may have lost it, too
    assert [d.attempt for d in collect(front, 1)] == [second.attempt]


def test_a_partitioned_worker_is_replaced_and_not_heard(
    make: Maker, port: int, proxy: Callable[[int], Proxy]
) -> None:
    for number, lease_s in enumerate(LEASES_S):
        leases = {"lease_s": lease_s, "topic": f"apart{number}"}
        way = proxy(port)
        front, near = make(port, **leases), make(port, "near", **leases)
        far = make(way.port, "far", **leases)
        front.put_requests([request("r")])
        first = take(far, 1)[0]
        way.is_silent = True
        second, began = take(near, 1)[0], time.monotonic()
        far.put_results([delta(first, 0, finished=True)])  # the sockets between them still work
        near.put_results([delta(second, 0), delta(second, 1, finished=True)])
        if time.monotonic() - began < lease_s / 2:
            break  # else the near one may have lost it, too
    got = collect(front, 2)
    assert [(d.position, d.attempt) for d in got] == [(0, 2), (1, 2)]
    assert front.get_results(0.3) == []


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_step_of_the_hosts_clock_changes_nothing(
    make: Maker, port: int, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    lease_s = 4 * LEASE_S
    front, engine = make(port, lease_s=lease_s), make(port, "e", lease_s=lease_s)
    front.put_requests([request("r"), request("s")])
    taken = take(engine, 2)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    loads, deadline = list[InstanceLoad](), time.monotonic() + PATIENCE_S
    while not loads and time.monotonic() < deadline:
        engine.report_load(InstanceLoad("e", 1))
        time.sleep(0.05)
        loads = front.loads()
    assert [load.instance for load in loads] == ["e"] and loads[0].age_s < 600
    for one in taken:
        engine.put_results([delta(one, 0, finished=True)])
    assert len(collect(front, 2)) == 2


def test_no_wall_clock_is_read() -> None:
    sources = Path(link.__file__).parent.glob("*.py")
    words = re.compile(r"\btime\.(time|time_ns|localtime|gmtime)\b|\bdatetime\b|CLOCK_REALTIME")
    assert [path.name for path in sources if words.search(path.read_text())] == []


def test_a_newer_engine_of_the_same_name_takes_over_at_once(make: Maker, port: int) -> None:
    front, old, new = make(port, lease_s=60.0), make(port, "x", lease_s=60.0), None
    front.put_requests([request("r")])
    first = take(old, 1)[0]
    new = make(port, "x", lease_s=60.0)
    began = time.monotonic()
    second = take(new, 1)[0]
    assert second.attempt == first.attempt + 1 and time.monotonic() - began < 45
    old.report_load(InstanceLoad("x", 1))
    time.sleep(0.2)
    assert old.get_requests(PLENTY, 0.1) == []
    new.put_results([delta(second, 0, finished=True)])
    assert len(collect(front, 1)) == 1


# -- T7: a task that kills ------------------------------------------------------------------------


def test_a_request_that_kills_every_engine_is_put_aside(
    make: Maker, port: int, shared_redis: RedisProcess
) -> None:
    front = make(port, max_attempts=2, lease_s=LEASE_S)
    front.put_requests([request("poison")])
    for name in ("a", "b"):
        victim = make(port, name, max_attempts=2, lease_s=LEASE_S)
        assert take(victim, 1)[0].request_id == "poison"  # and is not heard of again
    answer = collect(front, 1)[0]
    assert answer.finished and answer.error_type == "WorkerError"
    assert answer.error is not None and "not tried again" in answer.error
    ((_, dead),) = shared_redis.client().xrange(front.cells[0].prefix + "dead")
    assert msgspec.msgpack.decode(dead[b"body"][SEAL_BYTES:], type=Request).request_id == "poison"
    assert make(port, "c", lease_s=LEASE_S).get_requests(PLENTY, 0.2) == []


def test_a_body_that_nobody_can_read_is_answered(
    make: Maker, serve: Callable[..., Engine], port: int, shared_redis: RedisProcess
) -> None:
    front, engine = make(port), make(port, "e")
    front.put_requests([request("r")])
    shared_redis.client().hset(front.cells[0].prefix + "t:r", "body", b"\x80\x04K\x01.")
    serve(engine, "e")
    answer = collect(front, 1)[0]
    assert answer.finished and answer.error is not None and "could not be read" in answer.error


# -- T3, T5: Redis dies, or forgets ---------------------------------------------------------------


@pytest.mark.parametrize("durability", ["no", "everysec", "always"])
def test_redis_killed_under_load_loses_nothing(
    make: Maker,
    serve: Callable[..., Engine],
    start_redis: Callable[..., RedisProcess],
    durability: str,
) -> None:
    settings = () if durability == "no" else ("--appendonly", "yes", "--appendfsync", durability)
    server = start_redis(*settings)
    front = make(server.port)
    engines = [serve(make(server.port, n), n, 2, 0.01) for n in ("a", "b")]
    names = [f"r{n}" for n in range(300)]
    shown: list[RequestOutputDelta] = []
    for start in range(0, len(names), 50):
        assert front.put_requests([request(n) for n in names[start : start + 50]]) == [None] * 50
        shown += collect(front, 10, 0.2)
        if start == 100:
            server.kill()
            time.sleep(0.3)
            server.start()
    shown += collect(front, 2 * len(names) - len(shown))
    for engine in engines:
        engine.stop()
    ends = Counter(d.request_id for d in shown if d.finished)
    assert ends == dict.fromkeys(names, 1)
    assert [d.error for d in shown if d.error] == []
    assert Counter((d.request_id, d.position) for d in shown).most_common(1)[0][1] == 1


def test_a_torn_end_of_the_append_only_file_is_survived(
    make: Maker, serve: Callable[..., Engine], start_redis: Callable[..., RedisProcess]
) -> None:
    server = start_redis("--appendonly", "yes", "--aof-load-truncated", "yes")
    front = make(server.port)
    front.put_requests([request(f"r{n}") for n in range(20)])
    server.kill()
    (file,) = Path(server.folder).glob("appendonlydir/*.incr.aof")
    file.write_bytes(file.read_bytes()[:-300])
    server.start()
    serve(make(server.port, "a"), "a", 1)
    assert Counter(d.request_id for d in collect(front, 20)) == Counter(f"r{n}" for n in range(20))


def test_a_replica_without_the_last_second_gets_what_it_lacks(
    make: Maker,
    serve: Callable[..., Engine],
    start_redis: Callable[..., RedisProcess],
    proxy: Callable[[int], Proxy],
) -> None:
    primary = start_redis("--repl-diskless-sync-delay", "0")
    replica = start_redis("--replicaof", "127.0.0.1", str(primary.port))
    way = proxy(primary.port)
    front = make(way.port)
    front.put_requests([request(f"r{n}") for n in range(5)])
    wait = replica.client()
    deadline = time.monotonic() + PATIENCE_S
    while not wait.exists(front.cells[0].prefix + "t:r4") and time.monotonic() < deadline:
        time.sleep(0.02)
    wait.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]
    assert front.put_requests([request(f"s{n}") for n in range(5)]) == [None] * 5
    way.target = replica.port
    primary.kill()
    way.cut()
    serve(make(way.port, "a"), "a", 1)
    names = [f"{kind}{n}" for kind in "rs" for n in range(5)]
    assert Counter(d.request_id for d in collect(front, 10)) == Counter(names)


# -- T8, T9: cancelling, and the books ------------------------------------------------------------


@pytest.mark.parametrize("driver", [GlobalScheduler, SplitwiseScheduler])
def test_cancels_at_any_moment_leave_the_books_in_order(
    make: Maker,
    serve: Callable[..., Engine],
    port: int,
    shared_redis: RedisProcess,
    driver: type[GlobalScheduler],
) -> None:
    front = make(port, driver=driver)
    engines = [serve(make(port, n, driver=driver), n, 3, 0.002) for n in ("a", "b", "c")]
    chance = random.Random(8)
    names = [f"r{n}" for n in range(300)]
    shown: list[RequestOutputDelta] = []
    for start in range(0, len(names), 10):
        front.put_requests([request(n) for n in names[start : start + 10]])
        front.abort(chance.sample(names[: start + 10], 5))
        shown += each_delta(front.get_results(0.005))
    deadline = time.monotonic() + PATIENCE_S
    while sum(d.finished for d in shown) < len(names) and time.monotonic() < deadline:
        shown += each_delta(front.get_results(0.05))
    assert Counter(d.request_id for d in shown if d.finished) == dict.fromkeys(names, 1)
    for engine in engines:
        engine.stop()
    deadline = time.monotonic() + PATIENCE_S
    while leftovers(front, shared_redis.client()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(front, shared_redis.client()) == []
    count = front.cells[0].counters()
    ways = ("finished", "failed", "cancelled", "expired", "dead", "taken_over", "unread")
    assert count["submitted"] == sum(count.get(way, 0) for way in ways) == 300
    assert count["tokens"] == count["waiting"] == 0


def test_the_front_end_dies_and_its_requests_do_not(
    make: Maker, serve: Callable[..., Engine], port: int, shared_redis: RedisProcess
) -> None:
    lease_s = 2.5 * LEASE_S
    dead, heir = make(port, lease_s=lease_s), make(port, lease_s=lease_s)
    dead.put_requests([request(f"r{n}") for n in range(6)])
    dead.close()
    assert heir.put_requests([request("r0")]) == [None], "nobody else reads it: it may be put again"
    engine = serve(make(port, "a", lease_s=lease_s), "a", 1)
    assert [d.request_id for d in collect(heir, 1)] == ["r0"]
    deadline = time.monotonic() + PATIENCE_S
    while leftovers(heir, shared_redis.client()) and time.monotonic() < deadline:
        time.sleep(0.05)
    engine.stop()
    count = heir.cells[0].counters()
    assert (count["unread"], count["finished"], count["taken_over"]) == (5, 1, 1)
    assert sorted(set(engine.taken)) == [f"r{n}" for n in range(6)]


def test_stopping_what_a_dead_front_end_wanted_does_not_stop_its_heirs_attempt(
    make: Maker, port: int, shared_redis: RedisProcess
) -> None:
    dead, heir = make(port, lease_s=60.0), make(port, lease_s=60.0)
    engine = make(port, "e", lease_s=60.0)
    dead.put_requests([request("r")])
    first = take(engine, 1)[0]
    dead.close()
    with engine._as_instance()._beat_lock:  # so it is given the next attempt before it hears
        assert heir.put_requests([request("r")]) == [None]
        deadline = time.monotonic() + PATIENCE_S
        while not engine.get_aborts() and time.monotonic() < deadline:
            engine.get_requests(PLENTY, 0.01)
        second = take(engine, 1)[0]
    told, deadline = heir.cells[0].prefix + "x:e", time.monotonic() + PATIENCE_S
    while shared_redis.client().exists(told) and time.monotonic() < deadline:
        engine.report_load(InstanceLoad("e", 1))
        time.sleep(0.01)
    time.sleep(0.1)  # what it heard has been read
    engine.put_results([delta(first, 0), delta(second, 0, finished=True)])
    assert [(d.attempt, d.finished) for d in collect(heir, 1)] == [(second.attempt, True)]


def test_what_is_taken_over_stands_where_it_stood(make: Maker, port: int) -> None:
    dead, other = make(port), make(port)
    dead.put_requests([request("first"), request("second")])
    other.put_requests([request("third")])
    dead.close()
    heir = make(port)
    assert heir.put_requests([request("second"), request("first")]) == [None, None]
    order = [r.request_id for r in take(make(port, "e"), 3)]
    assert order == ["first", "second", "third"]


def test_front_ends_that_die_fast_have_a_request_run_once_a_lease(
    shared_redis: RedisProcess,
) -> None:
    lease_s = 0.25
    cell = cell_of(shared_redis, False, lease_s)
    began, puts, attempts, num = time.monotonic(), 0, [], 0
    while num < 80:
        num += 1
        cell.front_beat(f"f{num}", "", "0-0")  # and is not heard of again
        puts += cell.submit(f"f{num}", 1, request("r"), b"", 60.0, (0, 0), 0)[0] == "ok"
        _, taken = cell.take("e", "1", num, PLENTY, 0, 0, False)
        attempts += [one.attempt for one in taken]
        time.sleep(lease_s / 10)
    most = 1 + (time.monotonic() - began) / lease_s
    assert 3 <= puts <= most
    assert attempts == list(range(1, puts + 1))


def test_what_kills_instances_gets_no_more_of_them_by_being_taken_over(
    shared_redis: RedisProcess,
) -> None:
    cell = cell_of(shared_redis, False)  # three failures are too many
    for number in (1, 2, 3):
        front = f"f{number}"
        cell.front_beat(front, "", "0-0")
        assert cell.submit(front, 1, request("poison"), b"", 60.0, (0, 0), 0) == ("ok", 0)
        _, taken = cell.take("e", f"{number}", number, PLENTY, 0, 0, False)
        assert [one.attempt for one in taken] == [2 * number - 1]
        # Another process has its name, gets the request too if it may, and leaves.
        _, taken = cell.take("e", f"{number}+", 10 + number, PLENTY, 0, 0, False)
        assert [one.attempt for one in taken] == ([2 * number] if number < 3 else [])
        cell.leave("e", f"{number}+")
        cell.front_leave(front)
    assert cell.counters()["dead"] == 1
    assert cell.take("e", "9", 99, PLENTY, 0, 0, False)[1] == []


# -- T11: strangers' bytes ------------------------------------------------------------------------


def test_ten_thousand_mutated_frames_change_nothing(make: Maker, port: int) -> None:
    front, engine = make(port, lease_s=60.0), make(port, "e", lease_s=60.0)
    front.put_requests([request("r"), request("s")])
    one, other = take(engine, 2)
    engine.put_results([delta(one, 0)])
    assert len(collect(front, 1)) == 1
    frames = [
        link._encode(link.Deltas([TokenDeltas(["zz"], [0], [1], [5])])),
        link._encode(link.Deltas([delta(request("zz"), 0, finished=True)])),
        link._encode(link.Hello("e2")),
    ]
    chance = random.Random(11)
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(front._front._link.address)  # type: ignore[union-attr]
    for _ in range(10_000):
        frame = bytearray(chance.choice(frames))
        for _ in range(chance.randint(1, 6)):
            place = chance.randrange(len(frame))
            kind = chance.randrange(3)
            if kind == 0:
                frame[place] = chance.randrange(256)
            elif kind == 1:
                del frame[place:]
                frame.append(chance.randrange(256))
            else:
                frame.insert(place, chance.randrange(256))
        socket.send(bytes(frame))
    engine.put_results([delta(one, 1, finished=True), delta(other, 0, finished=True)])
    got = collect(front, 2)
    assert sorted((d.request_id, d.position) for d in got) == [("r", 1), ("s", 0)]
    assert [d.error for d in got] == [None, None]
    context.destroy(linger=0)


def mutate(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    while bytes(changed) == data:
        for _ in range(chance.randint(1, 6)):
            place, kind = chance.randrange(len(changed) or 1), chance.randrange(3)
            if kind == 0 and changed:
                changed[place] = chance.randrange(256)
            elif kind == 1:
                del changed[place:]
            else:
                changed.insert(place, chance.randrange(256))
    return bytes(changed)


def test_no_mutated_body_is_taken_for_a_request(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    for options in ({}, {"key_file": str(key)}):
        bodies, chance = Bodies(read_options(options)), random.Random(1)
        sent = request("r", tokens=20)
        sealed = bodies.seal(sent)
        assert bodies.open("r", sealed) == sent
        for _ in range(10_000):
            with pytest.raises(ValueError, match=r"not as its front end"):
                bodies.open("r", mutate(chance, sealed))
    with pytest.raises(ValueError, match="another request"):
        bodies.open("s", sealed)
    with pytest.raises(ValueError, match="not as its front end"):  # of who lacks the key
        bodies.open("r", Bodies(read_options({})).seal(sent))


def test_spoilt_records_stop_nothing_behind_them_and_are_answered(
    make: Maker, serve: Callable[..., Engine], port: int, shared_redis: RedisProcess
) -> None:
    front, engine = make(port, lease_s=60.0), make(port, "e", lease_s=60.0)
    client, prefix, chance = shared_redis.client(), front.cells[0].prefix, random.Random(2)
    fields = ("tokens", "deadline", "attempt", "queued", "priority", "failures", "member", "at",
              "body")  # fmt: skip
    names = [f"{field}{n}" for field in fields for n in range(20)]
    front.put_requests([request(name) for name in [*names, "behind"]])
    for name in names:
        record, field = f"{prefix}t:{name}", name.rstrip("0123456789")
        client.hset(record, field, mutate(chance, client.hget(record, field) or b""))
    serve(engine, "e", 1)
    ends = collect(front, len(names) + 1)
    assert Counter(d.request_id for d in ends) == dict.fromkeys([*names, "behind"], 1)
    right = {d.request_id for d in ends if d.error is None}
    assert "behind" in right
    assert not [name for name in right if name.startswith("body")]


# -- T12: order -----------------------------------------------------------------------------------


def test_what_is_given_back_stands_where_it_stood(make: Maker, port: int) -> None:
    front = make(port)
    front.put_requests([request(f"r{n}") for n in range(6)])
    leaving = make(port, "leaving")
    first = leaving.get_requests(Capacity(3, 10**6, 64, 10**9), PATIENCE_S)
    assert [r.request_id for r in first] == ["r0", "r1", "r2"]
    front.put_requests([request("urgent", priority=-1), request("r6")])
    leaving.close()
    order = [r.request_id for r in take(make(port, "next"), 8)]
    assert order == ["urgent", *(f"r{n}" for n in range(7))]


def test_tenants_take_turns(make: Maker, port: int) -> None:
    front = make(port)
    many = [msgspec.structs.replace(request(f"a{n}", tokens=50), tenant="a") for n in range(8)]
    few = [msgspec.structs.replace(request(f"b{n}", tokens=50), tenant="b") for n in range(2)]
    front.put_requests([*many, *few])
    order = [r.request_id for r in take(make(port, "e"), 10)]
    assert order[:4] == ["a0", "b0", "a1", "b1"]
    assert order[4:] == [f"a{n}" for n in range(2, 8)]


# -- cells, and push mode -------------------------------------------------------------------------


def test_idle_instances_steal_from_other_cells(make: Maker, port: int) -> None:
    cells = {"load_shards_num": 4, "min_load_score": 1}
    front, engine = make(port, **cells), make(port, "only", **cells)
    side = front._as_front()
    for n in range(12):
        sent = request(f"r{n}")
        body = side._bodies.seal(sent)
        front.cells[n % 4].submit(side.name, n, sent, body, 60.0, (0, 0), 0)
    assert sorted(r.request_id for r in take(engine, 12)) == sorted(f"r{n}" for n in range(12))


def cell_of(server: RedisProcess, is_push: bool, lease_s: float = 60.0) -> Cell:
    server.client().flushall()
    return Cell(server.client(), "{x:0}:", lease_s, 3, is_push, Reach())


def queued_at(server: RedisProcess, count: int) -> list[int]:
    client = server.client()
    return [client.zcard(f"{{x:0}}:q:i{n}") for n in range(count)]


def test_push_keeps_to_instances_with_little_load(shared_redis: RedisProcess) -> None:
    cell = cell_of(shared_redis, True)
    for n, tokens in enumerate((0, 50, 5000, 9000)):
        cell.beat(f"i{n}", "e", ("mixed", tokens, 1, b"\x90"), "0", False, False)
        shared_redis.client().hset(f"{{x:0}}:i:i{n}", "at", 1 << 52)  # reports stay fresh
    for n in range(40):
        cell.submit("f", n, request(f"r{n}", tokens=100), b"", 60.0, (0, 0), 0)
    one, two, three, four = queued_at(shared_redis, 4)
    assert one + two == 40 and min(one, two) >= 10
    assert three == four == 0


def test_push_on_old_reports_is_not_a_rush_to_the_minimum(shared_redis: RedisProcess) -> None:
    cell = cell_of(shared_redis, True)
    for n in range(10):
        cell.beat(f"i{n}", "e", ("mixed", 1000 * n, 1, b"\x90"), "0", False, False)
        shared_redis.client().hset(f"{{x:0}}:i:i{n}", "at", 1)
    for n in range(60):
        cell.submit("f", n, request(f"r{n}", tokens=1), b"", 60.0, (0, 0), 0)
    queued = queued_at(shared_redis, 10)
    assert sum(queued) == 60 and sum(n > 0 for n in queued) >= 5
    assert sum(queued[:5]) > sum(queued[5:])


def test_what_waits_for_a_dead_instance_gets_another(
    make: Maker, serve: Callable[..., Engine], port: int
) -> None:
    kind = {"driver": SplitwiseScheduler, "lease_s": LEASE_S}
    front, dead = make(port, **kind), make(port, "dead", **kind)
    dead.report_load(InstanceLoad("dead", 1, num_total_blocks=100))
    time.sleep(0.1)
    front.put_requests([request(f"r{n}") for n in range(4)])
    alive = serve(make(port, "alive", **kind), "alive", 1)
    assert Counter(d.request_id for d in collect(front, 4)) == Counter(f"r{n}" for n in range(4))
    alive.stop()


def test_a_server_that_is_not_there_is_a_refusal_and_no_hang(make: Maker) -> None:
    front = make(free_port())
    began = time.monotonic()
    (refusal,) = front.put_requests([request("r")])
    assert refusal is not None and refusal.startswith("unavailable: ")
    assert time.monotonic() - began < 60
