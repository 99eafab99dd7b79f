"""Several API server processes that share one port and its engines: starts them, gives them
connections, ends them.

This process neither tokenizes nor streams. Its front door hands out connections, a supervisor keeps
each engine alive, and every API server is told when an engine starts or ends. An API server that
dies is started again; its requests are ended in the engines.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import structs

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.engine.processes import child, wire
from fastdeploy_core.engine.processes.egress import connect
from fastdeploy_core.engine.processes.supervisor import Listener, Supervisor
from fastdeploy_core.errors import FastDeployError, WorkerError, error_named
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.serving.asking import Plugins
from fastdeploy_core.serving.front.door import FrontDoor
from fastdeploy_core.serving.front.occupancy import Occupancy
from fastdeploy_core.types.engine import EngineHealth, EngineInfo

from .balance import Balance
from .common import common_health, config_of, meeting_in, named
from .front_end import METRICS_FOLDER, FrontEndInit, Hello
from .paths import balance_path, door_path, engine_folder, front_end_address, occupancy_path

logger = logging.getLogger(__name__)

POLL_S = 0.1
# Seconds after the grace period for last answers, before a process is ended.
END_S = 8.0
MAX_RESTARTS = 3  # of one API server, within RESTART_WINDOW_S
RESTART_WINDOW_S = 60.0
TARGET = "fd_scale_out.front_end:main"


class _Engine(Listener):
    """One engine, and the sockets on which API servers hear about it."""

    def __init__(
        self,
        config: EngineConfig,
        resolved: Future[ResolvedPlugins],
        folder: str,
        num_front_ends: int,
        on_dead: Callable[[int, FastDeployError], None],
    ) -> None:
        self.number = config.parallel.data_parallel_rank
        self._on_dead = on_dead
        own = engine_folder(folder, self.number)
        Path(own).mkdir(mode=0o700)
        addresses = [front_end_address(own, n) for n in range(num_front_ends)]
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets = [connect(self._context, address) for address in addresses]
        self._lock = threading.Lock()  # guards the sockets
        # the newest state, for API servers that start late
        self._state: wire.ToFrontEnd | None = None
        self.supervisor = Supervisor(config, resolved, self, addresses)

    def on_ready(self, info: EngineInfo) -> None:
        """An engine takes requests from now on."""
        restarts = self.supervisor.health().num_restarts
        self._tell_state(wire.Attached(self.supervisor.folder, info, restarts))

    def on_down(self, reason: str) -> None:
        """The engine ended."""
        self._tell_state(wire.Detached(reason))

    def on_dead(self, error: FastDeployError) -> None:
        """No engine runs, and none will be started."""
        self._tell_state(wire.Dead(type(error).__name__, str(error)))
        self._on_dead(self.number, error)

    def tell(self, message: wire.ToFrontEnd) -> None:
        """Tell every API server."""
        data = wire.encode(message)
        with self._lock:
            for target in self._sockets:
                with contextlib.suppress(zmq.ZMQError):  # the socket is closed, or has no reader
                    target.send(data, zmq.NOBLOCK)

    def tell_state_to(self, number: int) -> None:
        """Tell an API server that was started again."""
        with self._lock:
            if self._state is not None:
                self._sockets[number].send(wire.encode(self._state))

    def stop(self) -> None:
        """End the engine; blocks until it is gone."""
        self.supervisor.stop()
        with self._lock:
            self._context.destroy(linger=0)

    def _tell_state(self, state: wire.ToFrontEnd) -> None:
        self._state = state
        self.tell(state)


class FrontEnds:
    """All parts of a server with --api-server-count above 1."""

    def __init__(
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        plugins: Plugins,
        listener: socket.socket,
    ) -> None:
        self._engine_config, self._server_config = engine_config, server_config
        self._resolved = plugins.resolved
        self._count = server_config.api_server_count
        self._folder = child.PrivateFolder("api")
        (self._folder.path / METRICS_FOLDER).mkdir(mode=0o700)
        folder = str(self._folder)
        if engine_config.parallel.data_parallel_size > 1:
            Balance.create(engine_config, self._count, balance_path(folder))
        if engine_config.parallel.shares_experts:
            (meeting := self._folder.path / "experts").mkdir(mode=0o700)
            engine_config = self._engine_config = meeting_in(engine_config, meeting)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._dead: set[int] = set()  # engines that will not be started again
        self._is_open = False
        self._engines = [
            _Engine(
                config_of(engine_config, number),
                plugins.resolved,
                folder,
                self._count,
                self._engine_died,
            )
            for number in range(engine_config.parallel.data_parallel_size)
        ]
        self._table = Occupancy(self._count, occupancy_path(folder), create=True)
        self.door = FrontDoor(listener, server_config, self._health, self._table)
        self._hall = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._hall.bind(door_path(folder))
        self._hall.listen(self._count)
        self._lock = threading.Lock()  # guards the halls, and who of them gets connections
        self._halls: dict[int, socket.socket] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._starts: dict[int, list[float]] = {}

    def _health(self) -> EngineHealth:
        health = common_health({each.number: each.supervisor.health() for each in self._engines})
        if health.ready and not self._halls:
            return structs.replace(health, ready=False, reason="no API server takes connections")
        return health

    def _engine_died(self, number: int, error: FastDeployError) -> None:
        """Called by supervisors' threads. All engines must start; later, one is enough to serve."""
        self._dead.add(number)
        if len(self._engines) > 1:
            error = named(error, number)
        needs_all = not self._is_open or self._engine_config.parallel.shares_experts
        if needs_all or len(self._dead) == len(self._engines):
            self._events.put(error)

    # -- this process's main thread ---------------------------------------------------------------

    def run(self, on_ready: Callable[[], None]) -> int:
        """Serve until a signal, or until the engine is dead; returns the exit status. on_ready is
        called when the port answers."""
        for kind in child.stop_signals():
            signal.signal(kind, lambda *_: self._events.put("signal"))
        for engine in self._engines:
            engine.supervisor.start()
        threading.Thread(target=self._receive, name="fd-hall", daemon=True).start()
        try:
            for number in range(self._count):
                self._spawn(number)
            for number in range(self._count):
                self._tell_first(number)
            if not self._wait_open():
                return 0
            self._is_open = True
            self.door.start()
            on_ready()
            return self._attend()
        finally:
            self._end()

    def _wait_open(self) -> bool:
        """Wait until every API server takes connections; False if a signal came first."""
        num_open = 0
        while num_open < self._count:
            event = self._next_event()
            if event == "signal":
                logger.info("stopped while starting")
                return False
            if isinstance(event, FastDeployError):
                raise event
            num_open += event == "open"
            self._raise_if_ended()
        return True

    def _attend(self) -> int:
        while True:
            event = self._next_event()
            if event == "signal":
                return self._drain()
            if isinstance(event, WorkerError):
                self._wait_ended(END_S)
                return 1
            if isinstance(event, FastDeployError):
                logger.error("an API server cannot serve: %s", event)
            if not self._restart_ended():
                return 1

    def _next_event(self) -> Any:
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=POLL_S)
        return None

    def _drain(self) -> int:
        """Let every API server finish its requests; a second signal ends them now."""
        self._table.drain()
        self._engines[0].tell(wire.Drain())  # each API server has to hear it once
        deadline = time.monotonic() + self._server_config.grace_s + END_S
        while time.monotonic() < deadline and self._running():
            if self._next_event() == "signal":
                self._engines[0].tell(wire.Drain())
                deadline = min(deadline, time.monotonic() + END_S)
        return 0

    def _wait_ended(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self._running():
            time.sleep(POLL_S)

    def _end(self) -> None:
        self.door.close()
        for process in self._processes.values():
            child.end(process, 0.0)
        stopping = [threading.Thread(target=engine.stop) for engine in self._engines]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        with contextlib.suppress(OSError):
            self._hall.shutdown(socket.SHUT_RDWR)
        for hall in (self._hall, *self._halls.values()):
            hall.close()
        self._folder.remove()

    # -- processes --------------------------------------------------------------------------------

    def _spawn(self, number: int) -> None:
        """Start an API server process; it imports its modules while plugins are resolved."""
        self._starts.setdefault(number, []).append(time.monotonic())
        self._processes[number] = child.spawn_early(TARGET, f"fastdeploy-api{number}")

    def _tell_first(self, number: int) -> None:
        """Send an API server its first record."""
        resolved = self._resolved.result()
        init = FrontEndInit(
            engine_config=self._engine_config,
            # Only one of them logs the line about the engine.
            server_config=replace(
                self._server_config, log_stats=self._server_config.log_stats and number == 0
            ),
            resolved=resolved,
            digest=resolved.digest,
            folder=str(self._folder),
            number=number,
            count=self._count,
        )
        child.give(self._processes[number], wire.encode(init))

    def _running(self) -> list[int]:
        return [number for number, p in self._processes.items() if p.poll() is None]

    def _raise_if_ended(self) -> None:
        for number, process in self._processes.items():
            if process.poll() is not None:
                with contextlib.suppress(queue.Empty):  # it may have sent its reason
                    event = self._events.get(timeout=1.0)
                    if isinstance(event, FastDeployError):
                        raise event
                raise WorkerError(
                    f"API server {number} {child.describe_exit(process.returncode)} while "
                    "starting; see the log"
                )

    def _restart_ended(self) -> bool:
        """Restart dead API servers; False if that does not help."""
        now = time.monotonic()
        for number, process in self._processes.items():
            if process.poll() is None:
                continue
            ended = child.describe_exit(process.returncode)
            with self._lock:
                self.door.remove(number)
                if number in self._halls:
                    self._halls.pop(number).close()
            for file in (self._folder.path / METRICS_FOLDER).glob(f"gauge_live*_{process.pid}.db"):
                file.unlink(missing_ok=True)
            for engine in self._engines:
                with contextlib.suppress(WorkerError):
                    engine.supervisor.send(wire.Gone(number))
            starts = self._starts[number] = [
                t for t in self._starts[number] if now - t < RESTART_WINDOW_S
            ]
            if len(starts) > MAX_RESTARTS:
                logger.critical("API server %d %s again and again; giving up", number, ended)
                return False
            logger.error("API server %d %s; it is started again", number, ended)
            self._spawn(number)
            self._tell_first(number)
        return True

    def _receive(self) -> None:
        """The thread that receives the first messages of API servers."""
        while True:
            try:
                hall, _ = self._hall.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(hall,), daemon=True).start()

    def _greet(self, hall: socket.socket) -> None:
        """Hear who an API server is, then that it serves, or why it cannot."""
        try:
            hello = msgspec.msgpack.decode(hall.recv(65536), type=Hello)
            if self._is_open:  # it was started again
                # Not before: what is sent on the connection to the one that died may be lost.
                for engine in self._engines:
                    engine.tell_state_to(hello.number)
            hello = msgspec.msgpack.decode(hall.recv(65536), type=Hello)
        except (OSError, *wire.UNREADABLE):
            return  # it ended before
        if hello.error_type:
            self._events.put(error_named(hello.error_type, hello.message))
            hall.close()
            return
        hall.setblocking(False)

        def hand_over(connection: socket.socket) -> None:
            socket.send_fds(hall, [b"c"], [connection.fileno()])
            connection.close()

        with self._lock:
            process = self._processes[hello.number]
            if process.pid != hello.pid or process.poll() is not None:
                hall.close()  # it died in the meantime, and its end may have been seen already
                return
            self._halls[hello.number] = hall
            self.door.add(hello.number, hand_over)
        self._events.put("open")
