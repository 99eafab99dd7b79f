"""The link of a front end to several engines that serve the same model (--data-parallel-size).

One place chooses an engine for each request (balance.py). When an engine ends, its requests of
which no token had come run again on another one, once; the others end. The rest of the front end
sees one engine.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.engine.client import EngineLink
from fastdeploy_core.engine.processes import child, wire
from fastdeploy_core.engine.processes.supervisor import NOT_READY, Listener
from fastdeploy_core.errors import FastDeployError, Unavailable, WorkerError
from fastdeploy_core.types import RequestOutputDelta
from fastdeploy_core.types.engine import EngineHealth, EngineInfo, EngineStats
from fastdeploy_core.types.request import split_branch_id

from .balance import Balance, Placement
from .common import common_health, common_info, named, total

logger = logging.getLogger(__name__)

ANSWER_S = 1.0  # numbers of an engine that needs longer are left out


@dataclass(slots=True, eq=False)
class _Sent:
    """A request that an engine answers."""

    put: wire.Put
    hashes: list[int]
    placement: Placement | None = None  # None: between two engines
    has_output: bool = False
    is_repeated: bool = False


@dataclass(slots=True)
class _Question:
    """AskStats that was sent to several engines."""

    waits_for: set[int]
    answers: dict[int, EngineStats]
    timer: threading.Timer


class Replicas:
    """EngineLink over the links to the engines. `send` and `health` may be called from any thread.

    `owns_engines`: this process starts the engines, and each one must start. Otherwise another
    process decides that, and this one begins when it has heard of all and one is ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        connect: Callable[[int, Listener], EngineLink],
        listener: Listener,
        balance: Balance,
        *,
        folder: child.PrivateFolder | None = None,
        owns_engines: bool,
    ) -> None:
        """folder: removed in the end."""
        self._listener = listener
        self._balance = balance
        self._owns_engines, self._folder = owns_engines, folder
        # All of them serve, or none does.
        self._needs_all = config.parallel.shares_experts
        self._lock = threading.Lock()  # guards everything below
        self._sent: dict[str, _Sent] = {}
        self._questions: dict[int, _Question] = {}
        self._infos: dict[int, EngineInfo] = {}
        engines = range(config.parallel.data_parallel_size)
        self._unknown = set(engines)  # not heard of yet
        self._up: set[int] = set()
        self._dead: set[int] = set()
        self._has_begun = False
        self._is_stopping = False
        self._links = [connect(engine, _Member(self, engine)) for engine in engines]

    def start(self) -> None:
        """Start all engines at once."""
        for link in self._links:
            link.start()

    def send(self, message: wire.ToEngine) -> None:
        """A request goes to one engine, what follows it to the same one, the rest to all."""
        if isinstance(message, wire.Put):
            self._put(_Sent(message, self._balance.hashes(message.request)))
        elif isinstance(message, wire.Abort):
            self._abort(message.request_ids)
        elif isinstance(message, wire.AskStats):
            self._ask(message)
        else:
            for link in self._links:
                with contextlib.suppress(WorkerError):
                    link.send(message)

    def health(self) -> EngineHealth:
        """Ready while one engine is."""
        return common_health({n: link.health() for n, link in enumerate(self._links)})

    def stop(self) -> None:
        """Stop all links at once."""
        with self._lock:
            self._is_stopping = True
            questions, self._questions = self._questions, {}
        for question in questions.values():
            question.timer.cancel()
        threads = [threading.Thread(target=link.stop) for link in self._links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._folder is not None:
            self._folder.remove()

    # -- requests ---------------------------------------------------------------------------------

    def _put(self, sent: _Sent) -> None:
        """Send to an engine that is ready; Unavailable when none is."""
        request = sent.put.request
        name = request.request_id
        ready = {n for n, link in enumerate(self._links) if link.health().ready}
        while ready:
            with self._lock:
                if sent.is_repeated and self._sent.get(name) is not sent:
                    return  # its client left meanwhile
                placement = self._balance.place(request, sent.hashes, ready)
                sent.placement = placement
                self._sent[name] = sent
            link = self._links[placement.engine]
            try:
                link.send(sent.put)
            except WorkerError:
                ready.discard(placement.engine)
                with self._lock:
                    if sent.placement is not placement:
                        return  # `down` was faster and has taken care of it
                    self._leave_engine(sent)
                continue
            if sent.is_repeated and self._sent.get(name) is not sent:
                # its client left, perhaps before the engine knew the request
                with contextlib.suppress(WorkerError):
                    link.send(wire.Abort([name]))
            return
        with self._lock:
            self._sent.pop(name, None)
        raise Unavailable(NOT_READY)

    def _abort(self, names: Sequence[str]) -> None:
        by_engine: dict[int, list[str]] = {}
        with self._lock:
            for name in names:
                request_id, branch = split_branch_id(name)
                sent = self._sent.get(request_id)
                if sent is None:
                    continue
                if sent.placement is not None:
                    by_engine.setdefault(sent.placement.engine, []).append(name)
                if branch is None:
                    self._forget(request_id)
        for engine, found in by_engine.items():
            with contextlib.suppress(WorkerError):  # it ended, and its requests with it
                self._links[engine].send(wire.Abort(found))

    def _forget(self, request_id: str) -> None:
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self._leave_engine(sent)

    def _leave_engine(self, sent: _Sent) -> None:
        if sent.placement is not None:
            self._balance.ended(sent.placement)
            sent.placement = None

    # -- questions --------------------------------------------------------------------------------

    def _ask(self, message: wire.AskStats) -> None:
        """Ask every engine that is up; the listener gets one answer."""
        number = message.number
        timer = threading.Timer(ANSWER_S, self._answer, (number,))
        timer.daemon = True
        with self._lock:
            asked = set(self._up)
            self._questions[number] = _Question(set(asked), {}, timer)
        for engine in asked:
            try:
                self._links[engine].send(message)
            except WorkerError:
                self.answered(engine, number, None)
        if not asked:
            with self._lock:
                self._questions.pop(number, None)
            raise Unavailable(NOT_READY)
        timer.start()

    def answered(self, engine: int, number: int, stats: EngineStats | None) -> None:
        """An engine's answer, or None: there will be none."""
        with self._lock:
            question = self._questions.get(number)
            if question is None:
                return
            question.waits_for.discard(engine)
            if stats is not None:
                question.answers[engine] = stats
            is_complete = not question.waits_for
        if is_complete:
            self._answer(number)

    def _answer(self, number: int) -> None:
        """Pass on what came."""
        with self._lock:
            question = self._questions.pop(number, None)
        if question is None:
            return
        question.timer.cancel()
        if question.answers:
            answers = dict(sorted(question.answers.items()))
            self._listener.on_message(wire.Stats(number, total(answers)))

    # -- reports of the links, each from its own thread -------------------------------------------

    def ready(self, engine: int, info: EngineInfo) -> None:
        """An engine takes requests from now on."""
        with self._lock:
            self._infos[engine] = info
            self._up.add(engine)
            self._unknown.discard(engine)
        self._begin()

    def heard(self, engine: int, message: wire.Deltas | wire.Stats) -> None:
        """An engine sent output or counters."""
        if isinstance(message, wire.Stats):
            self.answered(engine, message.number, message.stats)
            return
        # A request's first and its last output always are deltas of their own.
        turns = [
            output
            for output in message.deltas
            if isinstance(output, RequestOutputDelta) and (output.finished or not output.position)
        ]
        with self._lock:
            if engine not in self._up:
                return  # late words of an engine whose requests run elsewhere now
            for output in turns:
                sent = self._sent.get(output.request_id)
                if sent is None:
                    continue
                if output.finished:
                    self._forget(output.request_id)
                elif sent.placement is not None:
                    sent.has_output = True
                    self._balance.first_token(sent.placement)
        self._listener.on_message(message)

    def down(self, engine: int) -> None:
        """An engine ended: end its requests, or run them again."""
        with self._lock:
            self._up.discard(engine)
            if not self._owns_engines:
                self._unknown.discard(engine)
            held = [
                sent
                for sent in self._sent.values()
                if sent.placement is not None and sent.placement.engine == engine
            ]
            for sent in held:
                self._leave_engine(sent)
            self._balance.forget(engine)
            asked = [n for n, question in self._questions.items() if engine in question.waits_for]
        for number in asked:
            self.answered(engine, number, None)
        lost = [sent.put.request.request_id for sent in held if not self._repeat(sent)]
        if held:
            logger.warning(
                "engine %d held %d requests: %d had output or cannot run elsewhere and end, the "
                "rest runs again",
                *(engine, len(held), len(lost)),
            )
        if lost:
            self._listener.on_lost(lost)
        self._begin()

    def dead(self, engine: int, error: FastDeployError) -> None:
        """An engine will not be started again."""
        with self._lock:
            if self._is_stopping:
                return
            self._dead.add(engine)
            if not self._owns_engines:
                self._unknown.discard(engine)
            is_end = self._needs_all or len(self._dead) == len(self._links)
            is_end |= self._owns_engines and not self._has_begun
        if is_end:
            self._listener.on_dead(named(error, engine))
            return
        logger.critical("engine %d is not started again, the others serve: %s", engine, error)
        self._begin()

    def _repeat(self, sent: _Sent) -> bool:
        """Run a request again, if that was not done before and no output of it came."""
        if sent.has_output or sent.is_repeated:
            with self._lock:
                self._sent.pop(sent.put.request.request_id, None)
            return False
        sent.is_repeated = True
        try:
            self._put(sent)
        except WorkerError:
            return False
        return True

    def _begin(self) -> None:
        """Tell the listener what all engines are together, once that is known."""
        with self._lock:
            if self._unknown or not self._up:
                return
            self._has_begun = True
            info = common_info(self._infos.values(), len(self._links))
        self._listener.on_ready(info)


class _Member(Listener):
    """Passes on what one link reports, with the engine's number."""

    def __init__(self, replicas: Replicas, engine: int) -> None:
        self._replicas, self._engine = replicas, engine

    def on_ready(self, info: EngineInfo) -> None:
        """An engine takes requests from now on."""
        self._replicas.ready(self._engine, info)

    def on_message(self, message: wire.Deltas | wire.Stats) -> None:
        """The engine sent output or counters."""
        self._replicas.heard(self._engine, message)

    def on_down(self, reason: str) -> None:
        """The engine ended."""
        self._replicas.down(self._engine)

    def on_dead(self, error: FastDeployError) -> None:
        """No engine will be started any more."""
        self._replicas.dead(self._engine, error)
