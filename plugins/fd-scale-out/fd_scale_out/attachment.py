"""An API server's connection to an engine that another process keeps alive.

One thread receives messages of the supervisor and of the engine on one socket and reports to a
listener, as a supervisor in the same process would.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import zmq

from fastdeploy_core.engine.processes import wire
from fastdeploy_core.engine.processes.egress import connect
from fastdeploy_core.engine.processes.progress import Progress
from fastdeploy_core.engine.processes.supervisor import NOT_READY, POLL_MS, Listener, as_error
from fastdeploy_core.errors import Unavailable, WorkerError
from fastdeploy_core.types.engine import EngineHealth

from .paths import front_end_address

logger = logging.getLogger(__name__)


class Attachment:
    """`send` and `health` may be called from any thread."""

    def __init__(
        self,
        folder: str,
        number: int,
        progress_timeout_s: float,
        listener: Listener,
        on_drain: Callable[[], None],
    ) -> None:
        self._timeout_s = progress_timeout_s
        self._listener = listener
        self._on_drain = on_drain
        self._decode = wire.decoder(wire.ToFrontEnd)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(front_end_address(folder, number))
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._requests: Any = None
        self._progress: Progress | None = None
        self._reason = "starting"
        self._num_restarts = 0
        self._thread = threading.Thread(target=self._run, name="fd-attachment", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, message: wire.ToEngine) -> None:
        """Send to the engine; WorkerError when there is none."""
        data = wire.encode(message)
        with self._lock:
            if self._requests is None:
                raise Unavailable(NOT_READY)
            try:
                self._requests.send(data, zmq.NOBLOCK)
            except zmq.Again:
                raise WorkerError("the engine does not take requests") from None

    def health(self) -> EngineHealth:
        """The engine's health now; the supervisor reports when the engine has died."""
        age_s, reason, progress = 0.0, self._reason, self._progress
        if progress is not None:
            with contextlib.suppress(ValueError):  # closed in the meantime
                age_s = progress.age_s
            if 0 < self._timeout_s < age_s:
                reason = f"no progress for {age_s:.1f} s"
        return EngineHealth(
            alive=progress is not None,
            ready=progress is not None and not reason,
            last_progress_age_s=age_s,
            reason=reason,
            num_restarts=self._num_restarts,
        )

    def stop(self) -> None:
        """Receive and send nothing more; the engine goes on."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._detach("stopped")
        self._context.destroy(linger=0)

    def _run(self) -> None:
        try:
            self._receive()
        except Exception as error:  # an API server that hears nothing more would never answer
            logger.exception("the connection to the engine failed")
            self._listener.on_dead(WorkerError(f"the connection to the engine failed: {error}"))

    def _receive(self) -> None:
        while not self._stopping.is_set():
            if not self._socket.poll(POLL_MS):
                continue
            try:
                message: Any = self._decode.decode(self._socket.recv())
            except wire.UNREADABLE:
                logger.exception("something unreadable was sent to this front end; ignored")
                continue
            self._take(message)

    def _take(self, message: wire.ToFrontEnd) -> None:
        if isinstance(message, wire.Deltas | wire.Stats):
            self._listener.on_message(message)
        elif isinstance(message, wire.Attached):
            if self._attach(message):
                self._listener.on_ready(message.info)
        elif isinstance(message, wire.Detached):
            self._detach(message.reason)
            self._listener.on_down(message.reason)
        elif isinstance(message, wire.Dead):
            self._detach(message.message)
            self._listener.on_dead(as_error(message, message.message))
        else:
            self._on_drain()

    def _attach(self, message: wire.Attached) -> bool:
        """False if that engine has ended already, as one that dies while this process starts: its
        supervisor removes the folder, then tells that it ended."""
        self._detach("the engine ended")
        with self._lock:
            try:
                self._progress = Progress(message.folder)
            except FileNotFoundError:
                return False
            self._requests = connect(self._context, wire.request_address(message.folder))
            self._num_restarts = message.num_restarts
            self._reason = ""
        return True

    def _detach(self, reason: str) -> None:
        with self._lock:
            if self._requests is not None:
                self._requests.close(0)
            if self._progress is not None:
                self._progress.close()
            self._requests = self._progress = None
            self._reason = reason
