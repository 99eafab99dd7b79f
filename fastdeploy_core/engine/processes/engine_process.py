"""The engine process: takes requests, runs the core, sends deltas back.

Three threads: ingress receives requests, the main thread runs the core, egress sends what the
request scheduler has for clients. Where processes share a queue, front ends put requests into it
and get results from it in their own processes; then ingress only hears questions, and there is no
egress. A bad message is logged and dropped; a bad request is answered;
only a broken engine ends the process, with a non-zero status.
"""

from __future__ import annotations

import faulthandler
import logging
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import zmq

from fastdeploy_core.contracts.scheduler import Capacity, InstanceLoad, RequestScheduler, error_of
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.engine.observer import Observer
from fastdeploy_core.errors import FastDeployError, InvalidRequest, WorkerError, needs_trace
from fastdeploy_core.plugins.drivers import find_part, part
from fastdeploy_core.plugins.manager import hook_manager
from fastdeploy_core.types import Request, RequestOutputDelta, TokenDeltas

from . import child, wire
from .egress import Egress, connect
from .progress import Progress
from .refusal import refusal

logger = logging.getLogger(__name__)

IDLE_TICK_S = 0.5
REARM_S = 1.0
UNBOUNDED = 2**62


def main(data: bytes) -> int:
    """Run an engine until told to stop; returns the exit status."""
    init: wire.EngineInit = wire.decoder(wire.EngineInit).decode(data)
    if init.config.parallel.data_parallel_size > 1:
        child.name_in_log(f"engine{init.config.parallel.data_parallel_rank}")
    context = zmq.Context()
    output = context.socket(zmq.PUSH)
    output.connect(wire.output_address(init.folder))
    progress = Progress(init.folder)
    try:
        init.resolved.verify(init.digest)
        process = EngineProcess(init, context, output, progress)
    except BaseException as error:
        # The supervisor logs the message.
        level = logging.ERROR if needs_trace(error) else logging.DEBUG
        logger.log(level, "the engine did not start", exc_info=error)
        output.send(wire.encode(_failure(error)))
        context.destroy(linger=1000)
        return 1
    status = process.run()
    context.destroy(linger=1000)
    return status


def _failure(error: BaseException) -> wire.Failed:
    message = str(error) or type(error).__name__
    if not isinstance(error, FastDeployError):
        message = f"{type(error).__name__}: {message}"
    return wire.Failed(type(error).__name__, message)


class EngineProcess:
    """The state of the process."""

    def __init__(
        self,
        init: wire.EngineInit,
        context: zmq.Context[zmq.Socket[bytes]],
        output: zmq.Socket[bytes],
        progress: Progress,
    ) -> None:
        scheduling = replace(init.config.request_scheduler, epoch=secrets.randbits(63))
        self._config = config = replace(init.config, request_scheduler=scheduling)
        self._folder = init.folder
        self._front_ends = init.front_ends
        self._context = context
        self._output = output  # to the supervisor
        self._progress = progress
        driver = init.resolved.load("scheduler")
        # Whether front ends have request schedulers of their own.
        self._shares_queue: bool = driver.capabilities.shared_queue
        if self._shares_queue:  # they will need it when the model is loaded: too late to say so
            find_part("shared-queue", f"--scheduler-name {config.request_scheduler.name}")
        self._scheduler: RequestScheduler = driver(config.request_scheduler)
        self._core = EngineCore(config, init.resolved)
        self._control: Any = None
        if config.rollout:
            make = part("rollout-engine", "--enable-rollout")
            self._control = make(self._core, self._scheduler, self._show_life)
        self._num_free_blocks = self._core.info.num_blocks  # as of the newest tick
        self._observer = Observer(hook_manager(init.resolved))
        self._stopping, self._woken = threading.Event(), threading.Event()
        self._is_draining = False
        self._armed_s = 0.0
        self._ingress = threading.Thread(target=self._hear, name="fd-ingress", daemon=True)
        on_host = self._core.info.on_host
        self._egress = Egress(context, init.front_ends, self._results, is_resting=on_host)

    def run(self) -> int:
        """Serve until told to stop."""
        signal.signal(signal.SIGTERM, lambda *_: self._stopping.set())
        info = self._core.info
        if self._core.experts is not None:
            self._core.experts.watch(self._wake)
        self._observer.started(info)
        child.end_startup()
        self._progress.mark()
        self._output.send(wire.encode(wire.Ready(info)))
        self._ingress.start()
        if not self._shares_queue:
            self._egress.start()
        try:
            while not self._stopping.is_set():
                self._tick()
        except BaseException as error:
            if not (isinstance(error, WorkerError) and self._stopping.is_set()):
                logger.critical("the engine failed", exc_info=error)
                self._fail(error)
                self._finish()
                return 1
            logger.info("stopped in the middle of a step: %s", error)
        self._scheduler.close()
        self._finish()
        return 0

    def _tick(self) -> None:
        """Take new requests, run one step, publish its output; or wait a moment for work."""
        core, scheduler = self._core, self._scheduler
        self._rearm()
        if self._control is not None:
            self._control.tick()
        takes = core.admits and not self._is_draining
        aborts = scheduler.get_aborts()
        if aborts:
            core.abort(aborts)
            self._observer.aborted(aborts)
        is_idle = not core.has_work()
        batch = core.scheduler
        self._num_free_blocks = batch.roster.num_free_blocks
        free_slots = self._config.batch.max_num_seqs - batch.num_sequences
        if is_idle and not takes:
            (self._control or self._woken).wait(IDLE_TICK_S)
            self._woken.clear()
        elif takes and (free_slots > 0 or not (self._shares_queue or batch.roster.arrived)):
            capacity = Capacity(
                num_requests=max(0, free_slots),
                num_tenants=not batch.roster.arrived,
                num_free_blocks=self._num_free_blocks,
                block_size=core.info.block_size,
                num_tokens=UNBOUNDED,
            )
            timeout_s = IDLE_TICK_S if is_idle else 0.0
            for request in scheduler.get_requests(capacity, timeout_s):
                self._admit(request)
        outputs = core.step() if core.has_work() else []
        if outputs:
            scheduler.put_results(outputs)
            if not self._shares_queue:
                self._egress.note(outputs)
            self._observer.delivered(outputs)
        self._observer.tick(core.stats)
        self._progress.mark()

    def _admit(self, request: Request) -> None:
        """Add a request to the core. Any error ends this request only."""
        try:
            self._core.add(request)
        except Exception as error:
            if not isinstance(error, InvalidRequest):
                logger.exception("request %s could not be admitted", request.request_id)
            self._scheduler.put_results([refusal(request, error)])
        else:
            self._observer.admitted(request)

    def _show_life(self) -> None:
        """The main thread is at work for longer than a step takes; from any thread."""
        self._rearm()
        self._progress.mark()

    def _rearm(self) -> None:
        """Arm a timer: if the main thread does not come back in time, a thread outside the
        interpreter writes all stacks to the log and ends the process. It needs no interpreter lock,
        so threads that run meanwhile may spoil what it writes; see _show_stall."""
        timeout_s = self._config.watchdog.progress_timeout_s
        now = time.monotonic()
        if timeout_s > 0 and now - self._armed_s > min(REARM_S, timeout_s / 4):
            self._armed_s = now
            faulthandler.dump_traceback_later(timeout_s, exit=True)

    def _fail(self, error: BaseException) -> None:
        """The engine is broken. The client is told first, so that it ends its streams and sends
        nothing more. Requests that another instance could take over are not answered here."""
        last_words = self._context.socket(zmq.PUSH)
        last_words.connect(wire.output_address(self._folder))
        last_words.send(wire.encode(_failure(error)))
        last_words.close(1000)

    def _finish(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._stopping.set()
        if not self._shares_queue:
            self._egress.stop(2.0)
        self._ingress.join(2.0)
        self._observer.shutdown()
        self._core.close()

    def _hear(self) -> None:
        """The ingress thread: receive messages."""
        requests = self._context.socket(zmq.PULL)
        requests.bind(wire.request_address(self._folder))
        replies = [connect(self._context, address) for address in self._front_ends]
        decode = wire.decoder(wire.ToEngine)
        next_report_s = 0.0
        shown = 0
        while not self._stopping.is_set():
            if requests.poll(int(IDLE_TICK_S * 1000)):
                try:
                    self._take(decode.decode(requests.recv()), replies)
                except wire.UNREADABLE:
                    logger.exception("an unreadable message was dropped")
                except Exception:
                    logger.exception("a message could not be handled")
            shown = self._show_stall(shown)
            if time.monotonic() >= next_report_s:
                next_report_s = time.monotonic() + self._config.request_scheduler.lease_s / 8
                self._report_load()
        requests.close(0)
        for reply in replies:
            reply.close(1000)

    def _take(self, message: Any, replies: Sequence[zmq.Socket[bytes]]) -> None:
        if isinstance(message, wire.Put):
            is_new = self._egress.routes.add(message.request.request_id, message.front_end)
            refused = self._queue(message.request)
            if refused is not None:
                if is_new:  # else the request is refused because it runs already
                    self._egress.routes.remove(message.request.request_id)
                replies[message.front_end].send(wire.encode(wire.Deltas([refused])))
        elif isinstance(message, wire.Abort):
            self._scheduler.abort(message.request_ids)
        elif isinstance(message, wire.AskStats):
            stats = self._core.stats()
            stats.num_queued = getattr(self._scheduler, "num_queued", 0)
            stats.control = "" if self._control is None else self._control.state()
            replies[message.front_end].send(wire.encode(wire.Stats(message.number, stats)))
        elif isinstance(message, wire.Gone):
            # A shared queue itself notices that a front end is gone.
            self._scheduler.abort(self._egress.routes.remove_all(message.front_end))
        elif isinstance(message, wire.SetRole):
            self._core.set_role(message.role)
            self._wake()
        elif isinstance(message, wire.Control):
            if self._control is not None:
                self._control.put(message.action)
            self._wake()
        elif isinstance(message, wire.Drain):
            self._is_draining = True
        elif isinstance(message, wire.Stop):
            self._stopping.set()
            self._wake()

    def _wake(self) -> None:
        """Have an idle main thread look again; any thread."""
        self._woken.set()
        self._scheduler.abort([])
        self._core.wake()

    def _queue(self, request: Request) -> RequestOutputDelta | None:
        """Put a request into the request scheduler; one that can never run is refused at once,
        before requests that wait in front of it."""
        try:
            self._core.check(request)
        except Exception as error:
            if not isinstance(error, InvalidRequest):
                logger.exception("request %s could not be checked", request.request_id)
            return refusal(request, error)
        (reason,) = self._scheduler.put_requests([request])
        if reason is None:
            self._core.wake()
            return None
        delta = refusal(request, error_of(reason))
        self._core.count_rejection(delta.error_type.partition(":")[0])
        return delta

    def _show_stall(self, shown: int) -> int:
        """Write all stacks to the log, once for each stall, when half of the time is over after
        which the engine is ended. `shown`: the count of progress at the last stall; returns it."""
        count, age_s = self._progress.count, self._progress.age_s
        timeout_s = self._config.watchdog.progress_timeout_s
        if not 0 < timeout_s / 2 < age_s or count == shown:
            return shown
        logger.warning("the engine has made no progress for %.1f s; its threads are at", age_s)
        faulthandler.dump_traceback()  # no other thread moves meanwhile: this one holds the lock
        return count

    def _report_load(self) -> None:
        timeout_s = self._config.watchdog.progress_timeout_s
        if 0 < timeout_s < self._progress.age_s:
            return  # what a stuck engine holds must be free for others
        stats = self._core.stats()
        self._scheduler.report_load(
            InstanceLoad(
                instance=self._config.request_scheduler.instance,
                epoch=self._core.info.epoch,
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_free_blocks=self._num_free_blocks,
                num_total_blocks=stats.num_blocks_total,
                draining=self._is_draining,
            )
        )

    def _results(self, may_wait: bool) -> list[RequestOutputDelta | TokenDeltas]:
        return self._scheduler.get_results(IDLE_TICK_S if may_wait else 0.0)
