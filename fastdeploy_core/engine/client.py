"""Clients of an engine: AsyncEngine, for an event loop, with the engine, or several, in processes
of their own; and LocalEngine, for the offline API, with the engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.engine.processes import wire
from fastdeploy_core.engine.processes.supervisor import NOT_READY, Listener, Supervisor
from fastdeploy_core.errors import ConfigError, FastDeployError, QueueFull, Unavailable, WorkerError
from fastdeploy_core.plugins.drivers import part
from fastdeploy_core.types import InstanceRole, Request, RequestOutputDelta, TokenDeltas
from fastdeploy_core.types.engine import EngineHealth, EngineInfo, EngineStats

from .core import EngineCore
from .observer import Observer
from .stream import OutputStream

if TYPE_CHECKING:
    from fastdeploy_core.plugins.resolved import ResolvedPlugins

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0
DRAIN_LOOK_S = 0.1
STOPPED = "the engine stopped while it was answering this request"


class EngineLink(Protocol):
    """What connects a client to its engine; it reports to a Listener."""

    def start(self) -> None:
        """Start; the listener hears when an engine is ready, or that none will be."""

    def send(self, message: wire.ToEngine) -> None:
        """Send to the engine; WorkerError when there is none. Any thread."""

    def health(self) -> EngineHealth:
        """The engine's health now. Any thread."""

    def stop(self) -> None:
        """Detach from the engine, or end it if this link owns it; blocks until that is done."""


class AsyncEngine:
    """An engine in a process of its own. All methods but `health` belong to one event loop.

    If the process dies or stands still, `health` says why, and the process is started again
    (WatchdogConfig.max_restarts). Streams that had output end with WorkerError; requests without
    any run again in the next process, once, one at a time until each has output: one that ends
    that process, too, ends alone. Where a queue is shared, the queue decides about
    streams: they may go on in another engine. With --data-parallel-size, the engines together are
    one here.
    """

    info: EngineInfo

    def __init__(
        self, config: EngineConfig, connect: Callable[[Listener], EngineLink], front_end: int = 0
    ) -> None:
        """Use `start`, or `when_ready` with a link of one's own. front_end: the number of this one
        among several that share the engine."""
        self._config = config
        self._front_end = front_end
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, OutputStream] = {}
        # Requests that a lost process had, until they run again: one after the other, so that one
        # which kills its process does so alone.
        self._lost: dict[str, asyncio.TimerHandle] = {}
        self._suspect = ""  # the one that runs again and has no output yet
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._questions: dict[int, asyncio.Future[EngineStats]] = {}
        self._num_questions = 0
        self._is_draining = False
        self._is_closed = False
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._dead: asyncio.Future[str] = self._loop.create_future()
        self._listener = _ToLoop(self, self._loop)
        self._link = connect(self._listener)
        self._shares_queue = False

    @classmethod
    async def start(
        cls, config: EngineConfig, resolved: ResolvedPlugins | Future[ResolvedPlugins]
    ) -> AsyncEngine:
        """Start the engine process and wait until it is ready. ConfigError, PluginError or
        WorkerError carry the child's one-line reason. `resolved` may be a future that completes
        while the process starts."""
        if isinstance(resolved, Future):
            plugins = resolved
        else:
            plugins = Future()
            plugins.set_result(resolved)

        def connect(listener: Listener) -> EngineLink:
            if config.parallel.data_parallel_size == 1:
                return Supervisor(config, plugins, listener)
            link: EngineLink = part("engines", "--data-parallel-size above 1")(
                config, plugins, listener
            )
            return link

        return await cls(config, connect).when_ready(plugins)

    async def when_ready(self, resolved: Future[ResolvedPlugins]) -> AsyncEngine:
        """Start the link; returns this object once an engine is ready, or closes it and raises."""
        self._link.start()
        try:
            self.info = await self._ready
            driver = resolved.result().load("scheduler")
            if driver.capabilities.shared_queue:
                settings = self._config.request_scheduler
                make_link = part("shared-queue", f"--scheduler-name {settings.name}")
                self._link = make_link(self._link, driver(settings), self._listener)
                self._link.start()
                self._shares_queue = True
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def num_streams(self) -> int:
        """Requests that are being answered."""
        return len(self._streams)

    def check_admission(self, num_tokens: int = 0) -> None:
        """Raise QueueFull or WorkerError if a request put now would be refused. Cheap, so it can be
        asked before tokenizing. num_tokens: of the request's prompts, as far as they are known."""
        if self._is_draining or self._is_closed:
            raise Unavailable("the server is shutting down")
        if not self._link.health().ready:
            raise Unavailable(NOT_READY)
        limits = self._config.request_scheduler
        num_engines = self._config.parallel.data_parallel_size
        possible = (limits.max_size + self._config.batch.max_num_seqs) * num_engines
        if limits.max_size and len(self._streams) >= possible:
            raise QueueFull(
                f"{len(self._streams)} requests are being answered or wait, {possible} may; "
                "try again later"
            )
        if limits.max_tokens and num_tokens > max(limits.max_tokens, self.info.max_model_len):
            raise QueueFull(
                f"{num_tokens} prompt tokens are more than the {limits.max_tokens} that may wait"
            )

    async def generate(
        self, request: Request, chunk_tokens: int = 1
    ) -> AsyncGenerator[RequestOutputDelta, None]:
        """Deltas until one has finished=True. Each holds everything new since the previous one, and
        at least chunk_tokens tokens of a sequence (OutputStream says when fewer).

        Raises QueueFull, RequestTimeout, InvalidRequest, OutOfBlocks, WorkerError or, if this
        request alone failed, FastDeployError. Leaving the iterator (aclose) aborts the request.
        """
        self.check_admission()
        request_id = request.request_id
        if request_id in self._streams:
            raise FastDeployError(f"request id {request_id!r:.80} is in use")
        stream = OutputStream(request, chunk_tokens)
        stream.began_s = self._loop.time()
        self._streams[request_id] = stream
        self._all_ended.clear()
        try:
            self._link.send(wire.Put(request, self._front_end))
            while True:
                delta = await stream.get()
                yield delta
                if delta.finished:
                    return
        finally:
            del self._streams[request_id]
            if (timer := self._lost.pop(request_id, None)) is not None:
                timer.cancel()
            if self._suspect == request_id:
                self._suspect = ""
            self._run_next()
            if not self._streams:
                self._all_ended.set()
            if not stream.is_ended:
                self._abort_in_engine([request_id])

    def end_branches(self, branch_ids: Sequence[str]) -> None:
        """End sequences whose text is complete, named by types.branch_id; other sequences go on."""
        self._abort_in_engine(branch_ids)

    def health(self) -> EngineHealth:
        """Whether the engine process lives, moves and may get requests; never blocks."""
        health = self._link.health()
        health.draining = self._is_draining or self._is_closed
        if health.draining:
            health.ready = False
            health.reason = health.reason or "shutting down"
        return health

    async def stats(self) -> EngineStats:
        """Ask the engine process for its counters, or all of them for theirs; WorkerError without
        an answer in five seconds."""
        self._num_questions += 1
        number = self._num_questions
        answer: asyncio.Future[EngineStats] = self._loop.create_future()
        self._questions[number] = answer
        try:
            self._link.send(wire.AskStats(number, self._front_end))
            return await asyncio.wait_for(answer, STATS_TIMEOUT_S)
        except TimeoutError:
            raise WorkerError(f"the engine gave no stats within {STATS_TIMEOUT_S:g} s") from None
        finally:
            del self._questions[number]

    def set_role(self, role: InstanceRole) -> None:
        """Change what routers use this instance for: work that is handed over ends first, and
        `stats` says when that is done. WorkerError without an engine."""
        self._link.send(wire.SetRole(role))

    def control(self, action: dict[str, Any]) -> None:
        """Ask part `rollout-engine` for something; `stats` say what became of it. WorkerError
        without an engine."""
        self._link.send(wire.Control(action))

    async def wait_dead(self) -> str:
        """Return, with the reason, once the engine is dead and will not be started again."""
        return await asyncio.shield(self._dead)

    def take_no_more(self) -> None:
        """Where a queue is shared, the engine leaves what waits there to others from now on."""
        if self._shares_queue:
            with contextlib.suppress(WorkerError):  # there is no engine to tell
                self._link.send(wire.Drain())

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let the running ones end within grace_s, fail the rest."""
        self._is_draining = True
        self.take_no_more()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._all_ended.wait()
                if self._shares_queue:
                    await self._all_of_others()
        self._end_streams(Unavailable("the server is shutting down"))

    async def _all_of_others(self) -> None:
        """Wait until the engine has also answered what it took for other front ends."""
        with contextlib.suppress(WorkerError):  # it has none
            while (await self.stats()).num_requests:
                await asyncio.sleep(DRAIN_LOOK_S)

    async def close(self) -> None:
        """End the engine process and everything below it; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end_streams(Unavailable("the server is shutting down"))
        await asyncio.to_thread(self._link.stop)
        if self._ready.done() and not self._ready.cancelled():
            # mark the exception as retrieved: the caller of `start` has seen it
            self._ready.exception()

    def _end_streams(self, error: FastDeployError) -> None:
        running = [name for name, stream in self._streams.items() if not stream.is_ended]
        for name in running:
            self._streams[name].fail(error)
        if running:
            self._abort_in_engine(running)

    def _abort_in_engine(self, request_ids: Sequence[str]) -> None:
        # Without an engine there is nothing to abort.
        with contextlib.suppress(WorkerError):
            self._link.send(wire.Abort(list(request_ids)))

    def _on_ready(self, info: EngineInfo) -> None:
        self.info = info
        if not self._ready.done():
            self._ready.set_result(info)
        self._run_next()

    def _on_message(self, message: wire.Deltas | wire.Stats) -> None:
        if isinstance(message, wire.Stats):
            answer = self._questions.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message.stats)
            return
        stalled, streams = [], self._streams
        for output in message.deltas:
            if isinstance(output, TokenDeltas):
                columns = zip(
                    *(output.request_ids, output.attempts, output.positions, output.pieces()),
                    strict=True,
                )
                for request_id, attempt, position, token_ids in columns:
                    stream = streams.get(request_id)
                    if stream is None or attempt < stream.request.attempt:
                        continue
                    if not stream.put_tokens(position, token_ids, output.num_deltas):
                        stalled.append(request_id)
                continue
            stream = streams.get(output.request_id)
            if stream is None or output.attempt < stream.request.attempt:
                continue
            if not stream.put(output):
                stalled.append(output.request_id)
        if self._suspect and streams[self._suspect].has_output:
            self._suspect = ""
            self._run_next()
        if stalled:
            logger.warning("output is not read, or was lost in part: %s", ", ".join(stalled))
            self._abort_in_engine(stalled)

    def _on_down(self) -> None:
        # The reason is for the operator: it is in the log and in `health`.
        if not self._shares_queue:
            # May come twice for one end: what waits for the next process waits on.
            running = [name for name in self._streams if name not in self._lost]
            self._on_lost([name for name in running if not self._keep(name)])
            self._suspect = ""
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(WorkerError(STOPPED))

    def _on_lost(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None and not stream.is_ended:
                stream.fail(WorkerError(STOPPED))

    def _keep(self, request_id: str) -> bool:
        """Keep a lost request for the next process: one without output, the first time, and as long
        as it might wait in a queue."""
        stream = self._streams[request_id]
        if stream.is_ended or stream.has_output or stream.is_repeated:
            return False
        # Output of the lost attempt may still come, and would be taken for that of the next one.
        attempt = stream.request.attempt + 1
        stream.request = msgspec.structs.replace(stream.request, attempt=attempt)
        limits_s = (self._config.request_scheduler.ttl_s, stream.request.deadline_s)
        until_s = stream.began_s + min(limit_s for limit_s in limits_s if limit_s is not None)
        self._lost[request_id] = self._loop.call_at(until_s, self._on_lost, [request_id])
        return True

    def _run_next(self) -> None:
        """Run the next lost request again, if the one before has output or has ended."""
        request_id = next(iter(self._lost), "")
        if request_id and not self._suspect and self._run_again(self._streams[request_id]):
            self._lost.pop(request_id).cancel()
            self._suspect = request_id

    def _run_again(self, stream: OutputStream) -> bool:
        """Whether the request was sent; without an engine it waits for the next one."""
        if stream.is_ended:
            return False
        request = stream.request
        if request.deadline_s is not None:
            left_s = max(0.0, stream.began_s + request.deadline_s - self._loop.time())
            request = msgspec.structs.replace(request, deadline_s=left_s)
        try:
            self._link.send(wire.Put(request, self._front_end))
        except WorkerError:
            return False
        stream.is_repeated = True
        return True

    def _on_dead(self, error: FastDeployError) -> None:
        self._on_lost(list(self._lost))
        if not self._ready.done():
            self._ready.set_exception(error)
        if not self._dead.done():
            self._dead.set_result(str(error))


class _ToLoop(Listener):
    """Passes the supervisor's reports to the event loop, in order."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def on_ready(self, info: EngineInfo) -> None:
        """An engine takes requests from now on."""
        self._call(self._engine._on_ready, info)

    def on_message(self, message: wire.Deltas | wire.Stats) -> None:
        """The engine sent output or counters."""
        self._call(self._engine._on_message, message)

    def on_down(self, reason: str) -> bool:
        """The engine ended."""
        is_repeated = bool(self._engine._suspect)  # the loop forgets it next
        self._call(self._engine._on_down)
        return is_repeated

    def on_lost(self, request_ids: Sequence[str]) -> None:
        """These requests will not be answered any more."""
        self._call(self._engine._on_lost, request_ids)

    def on_dead(self, error: FastDeployError) -> None:
        """No engine will be started any more."""
        self._call(self._engine._on_dead, error)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        # The loop may be closed already, when its owner forgot to close the engine.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


class LocalEngine:
    """An engine inside this process, stepped by its caller. Not thread-safe.

    No watchdog looks after it: a device that hangs makes the caller hang.
    """

    def __init__(self, config: EngineConfig, resolved: ResolvedPlugins) -> None:
        """Load the model; raises ConfigError, PluginError or WorkerError."""
        count = config.parallel.data_parallel_size
        if count > 1:
            raise ConfigError(
                f"data_parallel_size is {count}, and this engine runs inside its caller's process, "
                "which has room for one; use one process for each, or run: fastdeploy serve "
                f"{config.model.path} --data-parallel-size {count}"
            )
        from fastdeploy_core.plugins.manager import hook_manager

        self._core = core = EngineCore(config, resolved)
        core.has_one_client = True
        self.begin, self.is_busy, self.has_work = core.begin, core.is_busy, core.has_work
        self.reset_prefix_cache, self.stats = core.reset_prefix_cache, core.stats
        self.info: EngineInfo = core.info
        self._observer = Observer(hook_manager(resolved))
        self._observer.started(self.info)
        self._is_closed = False
        self.control: Any = None
        if config.rollout:
            self.control = part("rollout-engine", "enable_rollout=True")(self._core)

    def add(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest or RequestTooLong."""
        self._core.add(request)
        self._observer.admitted(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without a further delta; unknown ids are ignored."""
        self._core.abort(request_ids)
        self._observer.aborted(request_ids)

    def step(self) -> list[RequestOutputDelta | TokenDeltas]:
        """Run one step; may return nothing even though work is left. WorkerError: it is dead."""
        outputs = self._core.step()
        if outputs:
            self._observer.delivered(outputs)
        self._observer.tick(self._core.stats)
        return outputs

    def close(self) -> None:
        """End worker processes, give the device back; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._observer.shutdown()
            self._core.close()
