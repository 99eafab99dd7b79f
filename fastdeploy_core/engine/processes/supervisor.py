"""Keeps one engine process alive: starts it, receives its messages, notices its death or
standstill, restarts it.

One thread does all of this. The operating system ties the child to that thread, and a busy or ended
event loop cannot block the watchdog.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import zmq

from fastdeploy_core import errors
from fastdeploy_core.config import EngineConfig
from fastdeploy_core.errors import FastDeployError, Unavailable, WorkerError
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.types.engine import EngineHealth, EngineInfo

from . import child, early_engine, wire
from .egress import connect
from .progress import Progress

logger = logging.getLogger(__name__)

# between looks at the watchdog's clocks; messages, the engine's end and `stop` wake at once
LOOK_MS = 1000
# wait for last messages; also the period of asking for the end where no descriptor tells it
POLL_MS = 100
STOP_GRACE_S = 8.0
# The engine ends itself after progress_timeout_s; if it cannot, the supervisor kills it this much
# later.
KILL_AFTER_S = 2.0
DUMP_S = 0.5
TIMER_SHARE = 0.7
RESTART_WINDOW_S = 600.0
MAX_BACKOFF_S = 30.0
# Clients are told this much; the reason is in the log and in `health`.
NOT_READY = "the engine is not ready; try again later"


class Listener:
    """What the supervisor reports, from its own thread."""

    def on_ready(self, info: EngineInfo) -> None:
        """An engine takes requests from now on."""

    def on_message(self, message: wire.Deltas | wire.Stats) -> None:
        """The engine sent output or counters."""

    def on_down(self, reason: str) -> object:
        """The engine ended or is about to end; requests sent to it will not be answered any more.
        May be called twice for one end. True: a request ended it that had ended the one before."""

    def on_lost(self, request_ids: Sequence[str]) -> None:
        """These requests will not be answered any more; others are not concerned."""

    def on_dead(self, error: FastDeployError) -> None:
        """No engine runs, and none will be started."""


class _Life:
    """One engine process with its folder and sockets. `resolved` may be a future: the process
    imports what it always needs while plugins are resolved. An error of resolving is raised
    here."""

    def __init__(
        self,
        config: EngineConfig,
        resolved: Future[ResolvedPlugins],
        front_ends: Sequence[str],
        waker: socket.socket,
    ) -> None:
        self.process = early_engine.spawn(config.device.tensor_library)
        self.started_s = time.monotonic()
        try:
            plugins = resolved.result()
        except BaseException:
            child.end(self.process, 0.0)
            raise
        self.folder = child.PrivateFolder("engine")
        self.progress = Progress(self.folder.path, create=True)
        self.context = zmq.Context()
        self.output = self.context.socket(zmq.PULL)
        self.output.setsockopt(zmq.RCVHWM, 0)
        self.output.bind(wire.output_address(str(self.folder)))
        self._exit = child.exit_descriptor(self.process)
        self._sources = zmq.Poller()
        for source in (self.output, waker, self._exit):
            if source is not None:
                self._sources.register(source, zmq.POLLIN)
        self.requests = connect(self.context, wire.request_address(str(self.folder)))
        init = wire.EngineInit(
            config=config,
            resolved=plugins,
            folder=str(self.folder),
            digest=plugins.digest,
            front_ends=list(front_ends) or [wire.output_address(str(self.folder))],
        )
        child.give(self.process, wire.encode(init))
        self.failure: wire.Failed | None = None
        self.is_ready = False

    def has_spoken(self) -> bool:
        """Whether there is output; waits a while for it, for the process's end or for `waker`."""
        wait_ms = POLL_MS if self._exit is None else LOOK_MS
        return self.output in dict(self._sources.poll(wait_ms))

    def tidy(self, grace_s: float) -> None:
        """End the process, if it has not ended, and remove its folder and sockets."""
        child.end(self.process, grace_s)
        if self._exit is not None:
            os.close(self._exit)
        self.context.destroy(linger=0)
        self.progress.close()
        self.folder.remove()

    def kill(self) -> None:
        """Ask the process for stacks, then kill it in any state."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(DUMP_S)
            self.process.kill()

    def ending(self, progress_timeout_s: float) -> str:
        """Why the process ended, in words."""
        if self.failure is not None:
            return self.failure.message
        ended = child.describe_exit(self.process.poll())
        # The process's own timer ends a stuck engine. It may have been armed up to a quarter of the
        # time before the last sign of progress.
        if 0 < TIMER_SHARE * progress_timeout_s <= self.progress.age_s:
            return f"the engine made no progress for {self.progress.age_s:.1f} s and {ended}"
        return f"the engine process {ended}"


class Supervisor:
    """Owner of the engine process. `send` and `health` may be called from any thread.

    `front_ends`: addresses to which the engine sends its output; without any, the listener gets it.
    An error of `resolved` ends everything before an engine starts.
    """

    def __init__(
        self,
        config: EngineConfig,
        resolved: Future[ResolvedPlugins],
        listener: Listener,
        front_ends: Sequence[str] = (),
    ) -> None:
        self._config = _with_name(config)
        parallel = config.parallel
        is_alone = parallel.data_parallel_size == 1
        self._name = "the engine" if is_alone else f"engine {parallel.data_parallel_rank}"
        self._resolved = resolved
        self._listener = listener
        self._front_ends = front_ends
        self._decode = wire.decoder(wire.FromEngine)
        self._stopping = threading.Event()
        self._waker, self._woken = socket.socketpair()
        self._send_lock = threading.Lock()
        self._life: _Life | None = None
        self._reason = "starting"
        self._has_lived = False
        self._num_restarts = 0
        self._restarts: list[float] = []
        self._is_blamed = False  # a request ended two engines: no sign that more will end
        self._thread = threading.Thread(target=self._run, name="fd-supervisor", daemon=True)

    @property
    def folder(self) -> str:
        """The running engine's folder; empty when there is no engine."""
        life = self._life
        return "" if life is None else str(life.folder)

    def start(self) -> None:
        """Start the thread and, in it, the engine."""
        self._thread.start()

    def send(self, message: wire.ToEngine) -> None:
        """Send to the engine; WorkerError when there is none."""
        data = wire.encode(message)
        with self._send_lock:
            life = self._life
            if life is None or not life.is_ready:
                raise Unavailable(NOT_READY)
            try:
                life.requests.send(data, zmq.NOBLOCK)
            except zmq.Again:
                raise WorkerError("the engine does not take requests") from None

    def health(self) -> EngineHealth:
        """The engine's health now."""
        life = self._life
        is_alive = life is not None and life.process.returncode is None
        age_s, reason = 0.0, self._reason
        if life is not None and life.is_ready:
            with contextlib.suppress(ValueError):  # closed in the meantime
                age_s = life.progress.age_s
            if self._is_late(age_s):
                reason = f"no progress for {age_s:.1f} s"
        return EngineHealth(
            alive=is_alive,
            ready=is_alive and not reason,
            last_progress_age_s=age_s,
            reason=reason,
            num_restarts=self._num_restarts,
        )

    def stop(self) -> None:
        """End the engine; blocks until the process and its folder are gone."""
        with contextlib.suppress(WorkerError):
            self.send(wire.Stop())
        self._stopping.set()
        self._waker.close()  # the other end becomes readable
        if self._thread.is_alive():
            self._thread.join()
        self._woken.close()

    def _run(self) -> None:
        error: FastDeployError = WorkerError("the engine was stopped")
        try:
            while True:
                ending = self._live()
                if self._stopping.is_set():
                    break
                if not self._may_restart(ending):
                    error = ending
                    break
                self._back_off()
                if self._stopping.is_set():
                    break
                self._num_restarts += 1
        except FastDeployError as failure:  # plugins cannot be resolved
            error = failure
        except BaseException as failure:
            logger.exception("the engine's supervisor failed")
            error = WorkerError(f"the engine's supervisor failed: {failure}")
        self._reason = str(error)
        self._listener.on_dead(error)

    def _live(self) -> FastDeployError:
        """Start an engine and attend to it until it ends; returns why it ended."""
        self._reason = "starting"
        life = _Life(self._config, self._resolved, self._front_ends, self._woken)
        self._life, self._is_blamed = life, False
        reason = ""
        try:
            reason = self._attend(life)
        finally:
            self._reason = reason or life.ending(self._config.watchdog.progress_timeout_s)
            with self._send_lock:
                self._life = None
            # What is not ready has no answers to end, and may not listen for minutes.
            life.tidy(STOP_GRACE_S if self._stopping.is_set() and life.is_ready else 0.5)
        if not self._stopping.is_set():
            logger.error("%s ended: %s", self._name, self._reason)
        self._is_blamed |= self._listener.on_down(self._reason) is True
        return as_error(life.failure, self._reason)

    def _attend(self, life: _Life) -> str:
        """Receive the engine's messages until it ends or is asked to; says why if killed."""
        watchdog = self._config.watchdog
        while not self._stopping.is_set():
            if life.has_spoken():
                self._hear(life)
                continue
            if life.process.poll() is not None:
                while life.output.poll(POLL_MS):  # last messages may still be on their way
                    self._hear(life)
                return ""
            if not life.is_ready:
                waited_s = time.monotonic() - life.started_s
                if watchdog.startup_timeout_s and waited_s > watchdog.startup_timeout_s:
                    life.kill()
                    return f"the engine did not start within {watchdog.startup_timeout_s:g} s"
                continue
            age_s = life.progress.age_s
            if self._is_late(age_s - KILL_AFTER_S):
                life.kill()
                return f"the engine made no progress for {age_s:.1f} s"
        return ""

    def _is_late(self, age_s: float) -> bool:
        timeout_s = self._config.watchdog.progress_timeout_s
        return timeout_s > 0 and age_s > timeout_s

    def _hear(self, life: _Life) -> None:
        try:
            message: Any = self._decode.decode(life.output.recv())
        except wire.UNREADABLE:
            logger.exception("%s sent something unreadable; ignored", self._name)
            return
        if isinstance(message, wire.Ready):
            life.is_ready = self._has_lived = True
            self._reason = ""
            self._listener.on_ready(message.info)
        elif isinstance(message, wire.Failed):
            life.failure = message
            if life.is_ready:
                life.is_ready = False
                self._reason = message.message
                self._is_blamed |= self._listener.on_down(message.message) is True
        else:
            self._listener.on_message(message)

    def _may_restart(self, ending: FastDeployError) -> bool:
        """Whether to start again: not after a ConfigError, else a few times in ten minutes."""
        if isinstance(ending, errors.ConfigError | errors.PluginError) or not self._has_lived:
            return False
        now = time.monotonic()
        self._restarts = [t for t in self._restarts if now - t < RESTART_WINDOW_S]
        return self._is_blamed or len(self._restarts) < self._config.watchdog.max_restarts

    def _back_off(self) -> None:
        wait_s = min(MAX_BACKOFF_S, 0.5 * 2 ** len(self._restarts))
        if not self._is_blamed:
            self._restarts.append(time.monotonic())
        logger.warning("%s is restarted in %.1f s", self._name, wait_s)
        self._reason = f"{self._reason}; being restarted"
        self._stopping.wait(wait_s)


def _with_name(config: EngineConfig) -> EngineConfig:
    """A name for the engine among those that share its queue: the same after each restart, so that
    the queue knows at once what the earlier one has lost."""
    scheduling = config.request_scheduler
    if scheduling.instance:
        return config
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return replace(config, request_scheduler=replace(scheduling, instance=name))


def as_error(failure: wire.Failed | wire.Dead | None, reason: str) -> FastDeployError:
    """The error to raise: the child's own error class where the caller can act on it."""
    kind = getattr(errors, failure.error_type, None) if failure is not None else None
    if isinstance(kind, type) and issubclass(
        kind, errors.ConfigError | errors.PluginError | errors.ResourceError
    ):
        error: FastDeployError = kind(reason)
        return error
    return WorkerError(reason)
