"""Runs steps on all ranks: rank 0 in this process, the others in processes of their own.

Steps run in the order of submission. They run in threads, with one exception: a single rank whose
device only queues work, or takes one step at a time, runs in the caller's thread, which saves the
hand-over. When a rank dies or fails, everything that is waited for fails with WorkerError within a
second, even if rank 0 is stuck in a collective.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol

import zmq

from fastdeploy_core import errors
from fastdeploy_core.config import EngineConfig
from fastdeploy_core.engine.processes import child, wire, worker_process
from fastdeploy_core.errors import FastDeployError, WorkerError
from fastdeploy_core.layers.experts import ExpertRanks
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.types import ModelRunnerOutput, SchedulerOutput
from fastdeploy_core.types.worker import WorkerInfo

logger = logging.getLogger(__name__)

_Task = tuple[Future[Any], Callable[[], Any], bool]  # the last item: whether the task is a step

POLL_MS = 100
CLOSE_GRACE_S = 3.0
STUCK_GRACE_S = 0.3


class StepResult(Protocol):
    """A submitted step."""

    def done(self) -> bool:
        """Whether `result` would not wait, as far as that is known."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step's output; raises what made the step fail."""


class _Launched:
    """The result of a step that the waiting thread launched itself."""

    def __init__(self, launch: Callable[[], Any]) -> None:
        self._error: Exception | None = None
        try:
            self._pending = launch()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        return self._error is not None or getattr(self._pending, "done", lambda: True)()

    def result(self) -> ModelRunnerOutput:
        if self._error is not None:
            raise self._error
        output: ModelRunnerOutput = self._pending.wait()
        return output


class Executor:
    """The ranks of one engine. Methods are called by one thread."""

    def __init__(self, config: EngineConfig, resolved: ResolvedPlugins) -> None:
        self._config = config
        self._resolved = resolved
        self.world_size = config.parallel.tensor_parallel_size
        self._lock = threading.Lock()
        self._waited_for: set[Future[Any]] = set()
        self._failure: FastDeployError | None = None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[tuple[Future[Any], Any] | None] = queue.SimpleQueue()
        self._worker: Any = None
        self._peers: _Peers | None = None
        self._has_waiter = False
        self._is_direct = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="fd-rank0", daemon=True)
        self._thread.start()
        self._waiter: threading.Thread | None = None

    def load(self) -> list[WorkerInfo]:
        """Build the workers and load the model on all ranks at once; one info per rank."""
        address = ""
        if self.world_size > 1:
            self._peers = _Peers(self._config, self._resolved, self._fail)
            address = self._peers.address
        own, *others = self._on_all_ranks(wire.Load(), lambda: self._load_own(address))
        self._start_waiter(own)
        return [own, *(loaded.info for loaded in others)]

    def initialize_cache(
        self,
        num_blocks: int,
        num_host_blocks: int,
        *more_blocks: int,
        host_files: Sequence[str] = (),
    ) -> None:
        """Allocate the KV pool on all ranks. more_blocks: of each bounded group of layers,
        then their host blocks.
        host_files: where each rank's host tier is to lie, group by group."""
        options = {"host_files": list(host_files)} if host_files else {}
        call = wire.InitializeCache([num_blocks, num_host_blocks, *more_blocks], options)
        self._on_all_ranks(call, lambda: self._worker.initialize_cache(*call.num_blocks, **options))

    @property
    def sampling(self) -> Any:
        """See Worker; None: a device's own worker has none."""
        return getattr(self._worker, "sampling", None)

    @property
    def experts(self) -> ExpertRanks | None:
        """Rank 0's, where engines share them."""
        is_shared = self._config.parallel.shares_experts
        return getattr(self._worker, "experts", None) if is_shared else None

    def submit(self, step: SchedulerOutput) -> StepResult:
        """Queue a step. It may start before earlier ones have finished, not before they started."""
        if self._is_direct:
            return _Launched(lambda: self._worker.launch(step))
        return self._submit(lambda: self._launch_everywhere(step), is_step=True)

    def control(self, action: dict[str, Any]) -> list[dict[str, Any]]:
        """Have all ranks do what part `rollout-worker` knows; one answer per rank."""
        call = wire.Control(action)
        own, *others = self._on_all_ranks(call, lambda: self._worker.control(action))
        return [own, *(controlled.answer for controlled in others)]

    def close(self) -> None:
        """End the other ranks and give the device back. A stuck rank 0 is abandoned. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._peers is not None:
            self._peers.stop()
        is_well = self._failure is None
        if self._worker is not None and is_well:
            with contextlib.suppress(FastDeployError, TimeoutError):
                self._submit(self._worker.close).result(CLOSE_GRACE_S)
        self._tasks.put(None)
        self._launched.put(None)
        for thread in (self._thread, self._waiter):
            if thread is not None:
                thread.join(CLOSE_GRACE_S if is_well else STUCK_GRACE_S)
        if self._peers is not None:
            self._peers.tidy()

    def _load_own(self, address: str) -> WorkerInfo:
        self._worker = worker_process.make_worker(
            self._config, self._resolved, 0, self.world_size, address
        )
        info: WorkerInfo = self._worker.load()
        return info

    def _launch_everywhere(self, step: SchedulerOutput) -> Any:
        if self._peers is not None:
            self._peers.send(step)
        return self._worker.launch(step)

    def _start_waiter(self, info: WorkerInfo) -> None:
        """With async scheduling, a second thread waits for results, so that the first one can queue
        the next step on the device meanwhile."""
        overlap = self._config.batch.overlap and info.overlap
        self._is_direct = self._peers is None and (info.asynchronous or not overlap)
        if self._is_direct or not overlap:
            return
        self._has_waiter = True
        self._waiter = threading.Thread(target=self._wait, name="fd-rank0-wait", daemon=True)
        self._waiter.start()

    def _submit(self, call: Callable[[], Any], *, is_step: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._waited_for.add(future)
        self._tasks.put((future, call, is_step))
        return future

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call, is_step = task
            try:
                result = call()
                if is_step and self._has_waiter:
                    self._launched.put((future, result))
                    continue
                if is_step:
                    result = result.wait()
            except BaseException as error:
                self._settle(future, error=error)
            else:
                self._settle(future, result)

    def _wait(self) -> None:
        while (item := self._launched.get()) is not None:
            future, pending = item
            try:
                result = pending.wait()
            except BaseException as error:
                self._settle(future, error=error)
            else:
                self._settle(future, result)

    def _settle(
        self, future: Future[Any], result: Any = None, error: BaseException | None = None
    ) -> None:
        with self._lock:
            self._waited_for.discard(future)
        # The future may have failed already, because a rank died.
        with contextlib.suppress(InvalidStateError):
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _fail(self, failure: FastDeployError) -> None:
        """Fail everything that is waited for. Called by the thread that watches the other ranks."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            waited_for, self._waited_for = self._waited_for, set()
        for future in waited_for:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(failure)

    def _on_all_ranks(self, message: wire.ToWorker, own: Callable[[], Any]) -> list[Any]:
        """What `own` returns on rank 0, and what the other ranks answer to the message."""
        if self._peers is None:
            return [self._submit(own).result()]
        self._peers.send(message)
        answers = [self._submit(own).result()]
        while len(answers) < self.world_size:
            try:
                answers.append(self._peers.answers.get(timeout=POLL_MS / 1000))
            except queue.Empty:
                if self._failure is not None:
                    raise self._failure from None
        return answers


class _Peers:
    """The worker processes of ranks 1 and up, and the thread that watches them."""

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedPlugins,
        on_failure: Callable[[FastDeployError], None],
    ) -> None:
        self._on_failure = on_failure
        self._is_stopping = False
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._folder = child.PrivateFolder("tp")
        address_folder = self._folder.path / "group"
        address_folder.mkdir(mode=0o700)
        self.address = str(address_folder)
        self._context = zmq.Context()
        self._status = self._context.socket(zmq.PULL)
        self._status.bind(worker_process.status_address(str(self._folder)))
        self._commands: list[zmq.Socket[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        world_size = config.parallel.tensor_parallel_size
        for rank in range(1, world_size):
            socket = self._context.socket(zmq.PUSH)
            socket.bind(worker_process.command_address(str(self._folder), rank))
            self._commands.append(socket)
            init = wire.WorkerInit(
                config=config,
                resolved=resolved,
                rank=rank,
                world_size=world_size,
                folder=str(self._folder),
                address=self.address,
                digest=resolved.digest,
            )
            target = "fastdeploy_core.engine.processes.worker_process:main"
            label = f"fd-rank{rank}"
            if config.parallel.data_parallel_size > 1:
                label = f"fd-engine{config.parallel.data_parallel_rank}-rank{rank}"
            self._processes.append(child.spawn(target, wire.encode(init), label))
        self._watcher = threading.Thread(target=self._watch, name="fd-ranks", daemon=True)
        self._watcher.start()

    def send(self, message: wire.ToWorker | SchedulerOutput) -> None:
        """Send every rank the same call or step."""
        is_step, payload = isinstance(message, SchedulerOutput), wire.encode(message)
        kind = worker_process.STEP if is_step else worker_process.CALL
        for rank, socket in enumerate(self._commands, 1):
            while not socket.poll(POLL_MS, zmq.POLLOUT):
                if self._is_stopping or self._processes[rank - 1].poll() is not None:
                    raise WorkerError(f"rank {rank} does not take its commands any more")
            socket.send_multipart([kind, payload])

    def stop(self) -> None:
        """End the processes: ask first, then kill."""
        self._is_stopping = True
        for socket in self._commands:
            with contextlib.suppress(zmq.Again):  # the process is gone or does not listen
                socket.send_multipart([worker_process.CALL, wire.encode(wire.Close())], zmq.NOBLOCK)
        for process in self._processes:
            child.end(process, CLOSE_GRACE_S)
        self._watcher.join(CLOSE_GRACE_S)

    def tidy(self) -> None:
        """Remove sockets, files and processes."""
        self._context.destroy(linger=0)
        self._folder.remove()

    def _watch(self) -> None:
        decode = wire.decoder(wire.FromWorker)
        while not self._is_stopping:
            if self._status.poll(POLL_MS):
                try:
                    self._take(decode.decode(self._status.recv()))
                except wire.UNREADABLE:
                    logger.exception("a worker process sent something unreadable; ignored")
                continue  # read a rank's last message before noticing its death
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None and not self._is_stopping:
                    ended = child.describe_exit(process.returncode)
                    self._on_failure(WorkerError(f"the worker process of rank {rank} {ended}"))
                    return

    def _take(self, message: wire.FromWorker) -> None:
        if isinstance(message, wire.WorkerFailed):
            self._on_failure(rank_failure(message))
        else:
            self.answers.put(message)


def rank_failure(message: wire.WorkerFailed) -> FastDeployError:
    """What a failed rank said, as the error to raise here."""
    kind = getattr(errors, message.error_type, None)
    if isinstance(kind, type) and issubclass(kind, errors.ConfigError):
        return kind(message.message)
    return WorkerError(f"rank {message.rank} failed: {message.message or message.error_type}")
