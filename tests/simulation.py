"""A server's engine, request scheduler and front ends on a virtual clock, with faults.

    python -m tests.simulation --seeds 10000
    python -m tests.simulation --first 4711 --seeds 1 --trace

One seed is one life: settings, clients, and which faults occur when. Real are `AsyncEngine` with
its streams (one per front end), `EngineProcess` with ingress, egress, `LocalScheduler`,
`EngineCore` and the batch scheduler, and the encoded messages between them. Simulated are the
clock, the model (whose tokens can be predicted), the sockets, and the supervisor. The same seed
does the same each time.

Faults: the engine process dies between any two of its actions, with the last part of its output
sent or not; a front end dies; messages are slow, come twice, or overtake each other; a step fails;
clients leave. `Violation` says which promise was broken:

- Every request ends, once, with the predicted tokens or with an error that a fault explains.
- What was shown before an error is the beginning of the predicted tokens.
- A request of which nothing was shown survives the loss of an engine, and runs at most twice.
- No client gets another one's cached prefix across salts; a deadline is kept.
- The engine soon stops working for a client that has left.
- When all is over, nothing is left of any request: no block, queue entry, stream or owner.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import selectors
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from fastdeploy_core.config import EngineConfig, RequestSchedulerConfig, WatchdogConfig
from fastdeploy_core.engine.client import STOPPED, AsyncEngine
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.engine.processes import engine_process, wire
from fastdeploy_core.engine.processes.supervisor import NOT_READY, Listener
from fastdeploy_core.errors import FastDeployError, Unavailable
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.scheduler import decode_count
from fastdeploy_core.scheduler.local import LocalScheduler
from fastdeploy_core.types import Request, RequestOutputDelta, each_delta
from fastdeploy_core.types.engine import EngineHealth
from tests.engine_lives import MAX_MODEL_LEN, POISON, check_step, make_options, make_random_request
from tests.null_engine import InlineExecutor, expected_answers, make_config

LATENCY_S = 0.001
DETECT_S = 0.01  # from the death of an engine to its report
RESTART_S = 0.5
LATE_S = 1.2  # what a deadline may be missed by: a step, slow messages, an engine's start
LEAVE_S = 1.2  # until the engine has stopped for a client that left
END_S = 60.0  # virtual seconds after which a request that has no answer is lost
QUIET_S = 20.0  # after the last answer, until nothing may be left


class Violation(AssertionError):
    """A promise was broken."""


def require(is_kept: bool, promise: str, *details: Any) -> None:
    """Raise Violation unless the promise was kept."""
    if not is_kept:
        raise Violation(": ".join(str(part) for part in (promise, *details)))


class _Selector(selectors.SelectSelector):
    """Instead of waiting, moves the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        """Events that are there; else the time has passed."""
        events = super().select(0)
        if not events:
            require(timeout is not None, "everybody waits, and nothing will happen")
            self._clock.now += max(0.0, timeout or 0.0)
        return events


class Clock:
    """The time of one life."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Resolved(ResolvedPlugins):
    """The local request scheduler, which reads the clock of the life."""

    def load(self, kind: str, name: str = "") -> Any:
        """The driver."""
        return _Scheduler


class _Scheduler(LocalScheduler):
    def __init__(self, config: RequestSchedulerConfig) -> None:
        super().__init__(config, time.monotonic)


class _Socket:
    """One end of a connection: hands bytes to a function."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self.send = lambda data, flags=0: take(data)

    def setsockopt(self, *_: Any) -> None:
        """Nothing to set."""

    def connect(self, address: str) -> None:
        """Connected already."""


class _Context:
    """Makes sockets in the order in which the engine process does: one per front end."""

    def __init__(self, takers: list[Callable[[bytes], None]]) -> None:
        self._takers = deque(takers)

    def socket(self, kind: int) -> _Socket:
        """The next one."""
        return _Socket(self._takers.popleft())


class _Progress:
    count = 0
    age_s = 0.0

    def mark(self) -> None:
        """Nobody watches."""


@dataclass
class Faults:
    """What goes wrong in a life."""

    engine_deaths: list[int] = field(default_factory=list)  # after so many actions of that process
    front_end_deaths: list[float] = field(default_factory=list)  # seconds
    slow: float = 0.0  # probabilities per message
    twice: float = 0.0
    overtaking: float = 0.0

    @classmethod
    def of(cls, draw: random.Random) -> Faults:
        """Each kind in some lives, so that each is also seen alone."""
        faults = cls()
        if draw.random() < 0.5:
            late = draw.choice([10, 150])
            faults.engine_deaths = [draw.randrange(late) for _ in range(draw.choice([1, 1, 2, 3]))]
        if draw.random() < 0.2:
            faults.front_end_deaths = [draw.random() for _ in range(draw.choice([1, 2]))]
        if draw.random() < 0.4:
            faults.slow = draw.choice([0.1, 0.6])
        if draw.random() < 0.25:
            faults.twice = draw.choice([0.05, 0.4])
        if draw.random() < 0.25:
            faults.overtaking = draw.choice([0.05, 0.3])
        return faults


class Wire:
    """A connection in one direction. Messages arrive in their order, unless faults say otherwise.
    After `cut`, those that the sender's process had not given away yet do not arrive."""

    def __init__(self, world: World, take: Callable[[bytes], None]) -> None:
        self._world, self._take = world, take
        self._last_s = 0.0  # when the newest message arrives
        self._flying: dict[int, asyncio.TimerHandle] = {}
        self._count = 0

    def send(self, data: bytes) -> None:
        """Deliver later."""
        draw, faults = self._world.draw, self._world.faults
        for _ in range(2 if draw.random() < faults.twice else 1):
            delay_s = LATENCY_S * (1 + draw.random())
            if draw.random() < faults.slow:
                delay_s += 0.2 * draw.random()
            at_s = time.monotonic() + delay_s
            if draw.random() >= faults.overtaking:
                at_s = self._last_s = max(at_s, self._last_s + 1e-6)
            self._count += 1
            number = self._count
            self._flying[number] = asyncio.get_running_loop().call_at(
                at_s, self._arrive, number, data
            )

    def _arrive(self, number: int, data: bytes) -> None:
        del self._flying[number]
        self._take(data)

    def cut(self) -> None:
        """The sender has died: messages from some point on are lost."""
        numbers = sorted(self._flying)
        for number in numbers[self._world.draw.randrange(len(numbers) + 1) :]:
            self._flying.pop(number).cancel()


class Engine:
    """An engine process, from its start to its death, and what it sends and gets."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.inbox: deque[bytes] = deque()
        self.is_dead = False
        self.wires = [Wire(world, front.hear) for front in world.fronts]
        front_ends = [str(n) for n in range(len(world.fronts))]
        init = wire.EngineInit(
            config=world.config,
            resolved=_Resolved([], {}),
            folder="",
            digest="",
            front_ends=front_ends,
        )
        context: Any = _Context([self._sender(n) for n in range(len(world.fronts))])
        output: Any = _Socket(lambda data: None)
        progress: Any = _Progress()
        self.process = engine_process.EngineProcess(init, context, output, progress)
        self.process._egress._stopping.set()  # so that each call of _run is one pass
        self._replies: Any = [_Socket(self._sender(n)) for n in range(len(world.fronts))]
        self._decode = wire.decoder(wire.ToEngine)

    def _sender(self, number: int) -> Callable[[bytes], None]:
        return lambda data: None if self.is_dead else self.wires[number].send(data)

    @property
    def core(self) -> Any:
        """What it runs."""
        return self.process._core

    async def run(self, dies_after: int | None) -> None:
        """Act until it dies. An action is to take messages, to step, or to send."""
        draw, pace_s = self.world.draw, self.world.pace_s
        actions = [self._take, self._step, self._send]
        for count in range(sys.maxsize):
            if count == dies_after:
                break
            if count % 3 != 2 or draw.random() < 0.7:  # what several steps made is sent together
                actions[count % 3]()
            pause_s = 0.0 if count % 3 else draw.choice([0.0, pace_s])
            if not self.inbox and not self.core.has_work():
                pause_s = 0.05
            await asyncio.sleep(pause_s)
        self.is_dead = True
        for each in self.wires:
            each.cut()

    def _take(self) -> None:
        num_here = len(self.inbox)
        for _ in range(min(num_here, self.world.draw.choice([1, num_here, num_here]))):
            self.process._take(self._decode.decode(self.inbox.popleft()), self._replies)

    def _step(self) -> None:
        num_steps = len(self.core._executor.steps)
        self.process._tick()
        if len(self.core._executor.steps) > num_steps and not self.world.is_poisonous:
            check_step(self.core)

    def _send(self) -> None:
        self.process._egress._run()

    def works_for(self, request_id: str) -> bool:
        """Whether the request is queued or runs."""
        scheduler: Any = self.process._scheduler
        running = self.core.scheduler.roster.requests
        return request_id in scheduler._entries or request_id in running

    def check_empty(self) -> None:
        """Nothing is left of any request."""
        require(not self.core.has_work(), "the engine still works for nobody")
        self.core.scheduler.check_idle()
        scheduler: Any = self.process._scheduler
        require(not scheduler._entries, "the request scheduler kept a request")
        require(not len(scheduler._queue), "a request is queued for ever")
        require(not scheduler._queue.active, "a tenant counts as active for ever")
        require(not scheduler._num_queued_tokens, "queued tokens are counted for ever")
        require(not scheduler._results, "output stays in the request scheduler")
        owners = self.process._egress.routes._owners
        require(not owners, "the engine kept who asked", owners)


class Link:
    """What connects one front end to the engine that lives; plays the supervisor."""

    def __init__(self, world: World, number: int, listener: Listener) -> None:
        self._world, self.number, self._listener = world, number, listener
        self._decode = wire.decoder(wire.FromEngine)
        self.wire: Wire | None = None
        self.is_dead = False
        self.puts: Counter[str] = Counter()
        self.delivered: set[str] = set()  # requests of which output came

    def start(self) -> None:
        """Nothing to start."""

    def send(self, message: wire.ToEngine) -> None:
        """As Supervisor.send."""
        if self.is_dead:
            return
        if self.wire is None:
            raise Unavailable(NOT_READY)
        if isinstance(message, wire.Put):
            self.puts[message.request.request_id] += 1
        self.wire.send(wire.encode(message))

    def health(self) -> EngineHealth:
        """As Supervisor.health."""
        is_up = self.wire is not None
        return EngineHealth(
            alive=is_up, ready=is_up, last_progress_age_s=0.0, reason="", num_restarts=0
        )

    def stop(self) -> None:
        """Nothing to stop."""

    def hear(self, data: bytes) -> None:
        """A message of the engine."""
        if self.is_dead:
            return
        message: Any = self._decode.decode(data)
        outputs = each_delta(message.deltas) if isinstance(message, wire.Deltas) else ()
        self.delivered.update(delta.request_id for delta in outputs)
        self._listener.on_message(message)

    def up(self, engine: Engine) -> None:
        """An engine is ready."""
        self.wire = Wire(self._world, engine.inbox.append)
        self._listener.on_ready(engine.process._core.info)

    def down(self) -> None:
        """It has died. Reported twice, as when its last words come before its end."""
        if self.wire is not None:
            self.wire.cut()
        self.wire = None
        for _ in range(self._world.draw.choice([1, 2])):
            self._listener.on_down("died")


class Front:
    """A front end: its place stays, also when its process dies and another one begins."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.clients: set[asyncio.Task[None]] = set()
        self.num_lives = 0
        self.engine: Any = None
        self.link: Any = None

    async def begin(self) -> None:
        """A process of it starts."""

        def connect(listener: Listener) -> Link:
            self.link = Link(self.world, self.number, listener)
            return self.link

        self.num_lives += 1
        self.engine = AsyncEngine(self.world.config, connect, self.number)
        if self.world.engine is not None:
            self.link.up(self.world.engine)
            resolved: Future[ResolvedPlugins] = Future()
            resolved.set_result(_Resolved([], {}))
            await self.engine.when_ready(resolved)

    def hear(self, data: bytes) -> None:
        """A message of an engine, this one or one before it."""
        self.link.hear(data)

    def die(self) -> None:
        """The process ends, and says nothing to anybody; its supervisor tells the engine."""
        self.link.is_dead = True
        for client in self.clients:
            client.cancel()
        if self.link.wire is not None:
            self.link.wire.send(wire.encode(wire.Gone(self.number)))


@dataclass
class Asked:
    """A request, and what its client saw."""

    request: Request
    front: Front
    arrives_s: float
    leaves_after: int | None  # deltas, after which the client goes away
    leaves_s: float | None  # or seconds
    chunk_tokens: int
    life: int = 0  # of the front end
    began_s: float = 0.0
    ended_s: float | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    num_deltas: int = 0
    num_cached: int = 0
    is_finished: bool = False
    has_left: bool = False
    error: FastDeployError | None = None

    def take(self, delta: RequestOutputDelta) -> None:
        """What the client gets."""
        name = self.request.request_id
        require(not self.is_finished, "something came after the end", name)
        require(delta.position == self.num_deltas, "a delta is missing or came twice", name)
        self.num_deltas += 1
        self.num_cached += delta.num_cached_tokens or 0
        for seq in delta.sequences:
            require(seq.index not in self.reasons, "an ended sequence went on", name)
            self.tokens.setdefault(seq.index, []).extend(seq.token_ids)
            if seq.finish_reason is not None:
                self.reasons[seq.index] = seq.finish_reason.value
        self.is_finished = delta.finished


class World:
    """One life."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.draw = draw = random.Random(seed)
        self.clock = clock
        self.faults = Faults.of(draw)
        self.is_poisonous = draw.random() < 0.2
        options = make_options(draw)
        options["watchdog"] = WatchdogConfig(progress_timeout_s=0.0)
        if self.is_poisonous:
            options["faults"] = ({"kind": "raise", "token": POISON},)
        self.pace_s = draw.choice([0.002, 0.02, 0.1])  # between steps, at most
        limits = RequestSchedulerConfig(max_size=draw.choice([0, 0, 2]))
        self.config: EngineConfig = replace(make_config(**options), request_scheduler=limits)
        self.fronts = [Front(self, n) for n in range(draw.choice([1, 1, 2]))]
        self.engine: Engine | None = None
        self.engines: list[Engine] = []
        self.deaths: list[tuple[float, set[str]]] = []  # when, and requests that had output
        self.asked = [self._make_asked(n) for n in range(draw.randrange(1, 10))]

    def _make_asked(self, number: int) -> Asked:
        draw = self.draw
        request = make_random_request(draw, number, self.is_poisonous)
        if draw.random() < 0.3:  # long enough that who works for nobody is seen
            request.sampling.max_tokens = MAX_MODEL_LEN
        if draw.random() < 0.15:
            request.deadline_s = draw.choice([0.05, 0.3, 2.0])
        return Asked(
            request,
            draw.choice(self.fronts),
            arrives_s=draw.choice([0.0, 0.0, draw.random()]),
            leaves_after=draw.choice([*[None] * 6, 1, 3]),
            leaves_s=draw.choice([*[None] * 8, 0.0, 0.01, 0.3]),
            chunk_tokens=draw.choice([1, 1, 4]),
        )

    async def live(self) -> None:
        """From the first request until nothing is left."""
        for front in self.fronts:
            await front.begin()
        supervisor = asyncio.create_task(self._supervise())
        await asyncio.sleep(0.001)
        others = [asyncio.create_task(self._end_front(s)) for s in self.faults.front_end_deaths]
        clients = []
        for asked in self.asked:
            client = asyncio.create_task(self._ask(asked))
            clients.append(asyncio.create_task(self._follow(asked, client)))
            asked.front.clients.add(client)
        _, late = await asyncio.wait(clients, timeout=END_S)
        names = [a.request.request_id for a in self.asked if a.ended_s is None]
        require(not late, "a request was never answered", names)
        await asyncio.gather(*clients, *others)
        await asyncio.sleep(QUIET_S)
        require(not supervisor.done() or supervisor.exception() is None, "the engine failed")
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)
        self._check()

    async def _supervise(self) -> None:
        deaths = [*self.faults.engine_deaths, None]
        for dies_after in deaths:
            self.engine = engine = Engine(self)
            self.engines.append(engine)
            for front in self.fronts:
                if not front.link.is_dead:
                    front.link.up(engine)
            await engine.run(dies_after)
            await asyncio.sleep(DETECT_S)
            self.engine = None
            had_output = set().union(*(front.link.delivered for front in self.fronts))
            self.deaths.append((time.monotonic(), had_output))
            for front in self.fronts:
                front.link.down()
            await asyncio.sleep(RESTART_S)

    async def _end_front(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        front = self.draw.choice(self.fronts)
        if len(self.fronts) == 1:
            return  # its engine ends with it
        front.die()
        await asyncio.sleep(0.1)
        await front.begin()

    async def _ask(self, asked: Asked) -> None:
        await asyncio.sleep(asked.arrives_s)
        while asked.front.link.is_dead:
            await asyncio.sleep(0.05)
        asked.life, asked.began_s = asked.front.num_lives, time.monotonic()
        try:
            async with asyncio.timeout(asked.leaves_s):
                await self._read(asked)
        except TimeoutError:
            asked.has_left = True
        except FastDeployError as error:
            asked.error = error
        finally:
            asked.ended_s = time.monotonic()

    async def _follow(self, asked: Asked, client: asyncio.Task[None]) -> None:
        """Until the request is over for everybody."""
        done, _ = await asyncio.wait([client], timeout=END_S)
        if done and not client.cancelled():
            client.result()
        if done:
            await self._see_it_stop(asked)

    async def _read(self, asked: Asked) -> None:
        stream = asked.front.engine.generate(asked.request, asked.chunk_tokens)
        async with aclosing(stream):
            async for delta in stream:
                asked.take(delta)
                if asked.leaves_after == asked.num_deltas and not asked.is_finished:
                    asked.has_left = True
                    return
                if self.draw.random() < 0.1:
                    await asyncio.sleep(0.05)  # a client that reads slowly

    async def _see_it_stop(self, asked: Asked) -> None:
        """When the client has left, by itself or with its front end, the engine stops soon. But a
        request may come twice, the second time after the first one's end, or be overtaken by the
        word that its front end has died. Then the engine works to its end."""
        engine = self.engine
        await asyncio.sleep(LEAVE_S)
        name = asked.request.request_id
        is_late = self.faults.twice or (
            self.faults.overtaking and asked.front.num_lives > asked.life
        )
        if engine is not None and not engine.is_dead and not is_late:
            require(not engine.works_for(name), "the engine works for a client that left", name)

    # -- promises ---------------------------------------------------------------------------------

    def _check(self) -> None:
        for asked in self.asked:
            self._check_answer(asked)
        for front in self.fronts:
            require(not front.engine._streams, "a front end kept a stream")
            require(not front.engine._lost, "a front end kept a lost request")
        if self.engine is not None:
            self.engine.check_empty()

    def _check_answer(self, asked: Asked) -> None:
        request, name = asked.request, asked.request.request_id
        link = asked.front.link
        expected = expected_answers(request, MAX_MODEL_LEN)
        for index, tokens in asked.tokens.items():
            require(tokens == expected[index][: len(tokens)], "wrong tokens", name, tokens)
        if sum(other.request.cache_salt == request.cache_salt for other in self.asked) == 1:
            require(not asked.num_cached, "a prefix was shared across salts", name)
        require(link.puts[name] <= 2, "a request ran more than twice", name)
        is_over = asked.has_left or asked.front.num_lives > asked.life
        if request.deadline_s is not None and not is_over:
            took_s = (asked.ended_s or 0.0) - asked.began_s
            require(took_s <= request.deadline_s + LATE_S, "a deadline was missed", name, took_s)
        if asked.error is not None:
            require(
                self._explains(asked, asked.error),
                "an error that nothing explains",
                name,
                repr(asked.error),
                self.faults,
            )
        elif not is_over:
            require(asked.is_finished, "an answer broke off without an error", name)
            answers = [asked.tokens.get(index, []) for index in range(request.sampling.n)]
            require(answers == expected, "an answer is not whole", name, answers, expected)
            require(len(asked.reasons) == request.sampling.n, "an end has no reason", name)

    def _explains(self, asked: Asked, error: FastDeployError) -> bool:
        """Whether something that happened is a reason for this error."""
        request, text = asked.request, str(error)
        ended_s = asked.ended_s or 0.0
        deaths = [had for at_s, had in self.deaths if asked.began_s <= at_s <= ended_s]
        if text == STOPPED:
            return (
                len(deaths) > 1
                or any(request.request_id in had for had in deaths)
                or (request.deadline_s is not None and bool(deaths))
            )
        if text == NOT_READY:
            down_s = DETECT_S + RESTART_S + LATENCY_S
            return any(at_s - DETECT_S <= ended_s <= at_s + down_s for at_s, _ in self.deaths)
        if "output was lost" in text or "output of this request was lost" in text:
            return self.faults.overtaking > 0
        if "duplicate request id" in text:
            return self.faults.twice > 0
        if "deadline" in text:
            return request.deadline_s is not None
        if "queue full" in text or "are being answered or wait" in text:
            return self.config.request_scheduler.max_size > 0
        if "running the model failed" in text:
            return request.prompt_token_ids[-1] == POISON
        return False


@contextmanager
def _virtual(clock: Clock) -> Iterator[None]:
    """The clock is everybody's, engines are stepped here, and nothing waits for real."""

    def make_core(config: EngineConfig, resolved: ResolvedPlugins) -> EngineCore:
        executor: Any = InlineExecutor(config)
        core = EngineCore(config, ResolvedPlugins([], {}), executor)
        # they took the real clock when their modules were imported
        core.scheduler._clock = core.scheduler.roster.clock = clock
        return core

    ticks = itertools.count()
    with (
        mock.patch.object(time, "monotonic", clock),
        # how long something computes is taken for the same each time
        mock.patch.object(time, "perf_counter", lambda: 1e-4 * next(ticks)),
        mock.patch.object(engine_process, "EngineCore", make_core),
        mock.patch.object(engine_process, "IDLE_TICK_S", 0.0),
        # how many tokens come at a time must not depend on this machine's pace
        mock.patch.object(decode_count, "most_at", lambda *step: 1e6),
    ):
        yield


def live(seed: int) -> World:
    """Play one life; raises Violation, or what else went wrong."""
    clock = Clock()
    with _virtual(clock):
        loop = asyncio.SelectorEventLoop(_Selector(clock))
        try:
            world = World(seed, clock)
            loop.run_until_complete(world.live())
        finally:
            rest = asyncio.all_tasks(loop)
            for task in rest:
                task.cancel()
            if rest:
                loop.run_until_complete(asyncio.wait(rest))
            loop.close()
    return world


def main() -> int:
    """Play lives and print what they held."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--trace", action="store_true", help="show log and tracebacks")
    options = parser.parse_args()
    if not options.trace:
        logging.disable(logging.CRITICAL)
    began, failed = time.perf_counter(), 0
    seen: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.seeds):
        try:
            world = live(seed)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if options.trace:
                traceback.print_exc()
            continue
        seen["requests"] += len(world.asked)
        seen["whole answers"] += sum(a.is_finished for a in world.asked)
        seen["errors"] += sum(a.error is not None for a in world.asked)
        seen["engines that died"] += len(world.deaths)
        seen["requests that ran again"] += sum(
            count > 1 for front in world.fronts for count in front.link.puts.values()
        )
    took_s = time.perf_counter() - began
    print(
        f"{options.seeds} seeds, {failed} failed, {took_s:.0f} s: "
        + ", ".join(f"{count} {what}" for what, count in seen.items())
    )
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
