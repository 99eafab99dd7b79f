"""A front end's link when many processes share one queue of requests.

The front end has a request scheduler of its own, as each engine has. Requests and their output pass
through these two objects, past the engine's sockets, so they survive the engine: the queue gives
what a dead one held to another, or to the same one after its restart.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from fastdeploy_core.contracts.scheduler import RequestScheduler, error_of
from fastdeploy_core.engine.processes import wire
from fastdeploy_core.engine.processes.refusal import refusal
from fastdeploy_core.engine.processes.supervisor import Listener
from fastdeploy_core.errors import WorkerError
from fastdeploy_core.types import Request
from fastdeploy_core.types.engine import EngineHealth

if TYPE_CHECKING:
    from fastdeploy_core.engine.client import EngineLink

logger = logging.getLogger(__name__)

WAIT_S = 0.5
LOOK_S = 1.0  # between looks at the other instances


class SharedQueue:
    """Entry point `shared-queue`: an EngineLink around the link to this front end's own engine,
    which still tells how that engine is and counts what it does. `send` and `health` never
    block."""

    def __init__(self, engine: EngineLink, scheduler: RequestScheduler, listener: Listener) -> None:
        self._engine, self._scheduler, self._listener = engine, scheduler, listener
        self._messages: queue.SimpleQueue[wire.Put | wire.Abort | None] = queue.SimpleQueue()
        self._has_instances = False
        self._is_draining = False
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._put, "fd-queue-requests"),
                (self._get, "fd-queue-results"),
                (self._look, "fd-queue-instances"),
            )
        ]

    def start(self) -> None:
        """Start its threads; the engine runs already."""
        for thread in self._threads:
            thread.start()

    def send(self, message: wire.ToEngine) -> None:
        """Requests and aborts go to the queue, the rest to the engine."""
        if isinstance(message, wire.Put | wire.Abort):
            self._messages.put(message)
        else:
            self._is_draining |= isinstance(message, wire.Drain)
            self._engine.send(message)

    def health(self) -> EngineHealth:
        """That of the own engine; ready as long as any instance of the queue is."""
        health = self._engine.health()
        if self._has_instances:
            health.ready = True
        return health

    def stop(self) -> None:
        """Pass on what was sent, leave the queue, end the own engine."""
        self._messages.put(None)
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._scheduler.close()
        self._engine.stop()

    def _put(self) -> None:
        """The thread that may wait for the queue's server."""
        while (message := self._messages.get()) is not None:
            requests: list[Request] = []
            while isinstance(message, wire.Put):
                requests.append(message.request)
                if self._messages.empty():
                    break
                message = self._messages.get()
            try:
                self._put_requests(requests)
                if isinstance(message, wire.Abort):
                    self._scheduler.abort(message.request_ids)
            except Exception:
                logger.exception("requests could not be passed to the queue")
            if message is None:
                return

    def _put_requests(self, requests: list[Request]) -> None:
        if not requests:
            return
        try:
            reasons = self._scheduler.put_requests(requests)
        except Exception as error:
            answers = [refusal(request, error) for request in requests]
            self._listener.on_message(wire.Deltas(list(answers)))
            raise
        for request, reason in zip(requests, reasons, strict=True):
            if reason is not None:
                self._listener.on_message(wire.Deltas([refusal(request, error_of(reason))]))

    def _get(self) -> None:
        while not self._stopping.is_set():
            try:
                outputs = self._scheduler.get_results(WAIT_S)
            except Exception:
                logger.exception("results could not be taken from the queue")
                self._stopping.wait(WAIT_S)
                continue
            if outputs:
                self._listener.on_message(wire.Deltas(outputs))

    def _look(self) -> None:
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                loads = self._scheduler.loads()
                self._has_instances = any(not load.draining for load in loads)
            except Exception:
                logger.exception("the queue's instances could not be seen")
                self._has_instances = False
            if self._is_draining:  # an engine that was started again has not heard of it
                with contextlib.suppress(WorkerError):
                    self._engine.send(wire.Drain())
            self._stopping.wait(max(0.0, LOOK_S - (time.monotonic() - began_s)))
