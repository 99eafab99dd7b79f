"""What the routes of one app share: engine, tokenizer, limits, counters. There are no globals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.engine.input import RequestLimits, default_sampling_values
from fastdeploy_core.engine.output import OutputProcessor
from fastdeploy_core.errors import InvalidRequest, WorkerError
from fastdeploy_core.serving.front.occupancy import OwnOccupancy
from fastdeploy_core.serving.http.errors import ApiError, too_busy, unavailable
from fastdeploy_core.serving.http.threads import Threads
from fastdeploy_core.tokenizer.template_process import MAX_PROCESSES

from .metrics import Metrics
from .parser_choice import parser_named

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastdeploy_core.grammar.compiler import GrammarCompiler
    from fastdeploy_core.tokenizer import Tokenizer
    from fastdeploy_core.types import Request, RequestOutputDelta
    from fastdeploy_core.types.engine import EngineHealth, EngineInfo, EngineStats

DRAINING_RETRY_S = 5.0
MAX_WAITING_TEMPLATES = 16


class Engine(Protocol):
    """The part of AsyncEngine that serving uses."""

    info: EngineInfo

    def check_admission(self, num_tokens: int = 0) -> None:
        """Raise QueueFull or WorkerError at once if a request put now would be refused."""
        ...

    def generate(
        self, request: Request, chunk_tokens: int = 1
    ) -> AsyncIterator[RequestOutputDelta]:
        """Deltas of one request, each with at least chunk_tokens tokens; leaving the iterator
        aborts it."""
        ...

    def end_branches(self, branch_ids: Sequence[str]) -> None:
        """End single sequences of running requests."""
        ...

    def health(self) -> EngineHealth:
        """Cheap, from any thread."""
        ...

    async def stats(self) -> EngineStats:
        """Gauges and counters."""
        ...

    async def drain(self, grace_s: float) -> None:
        """Finish what runs, refuse what is new."""
        ...

    async def close(self) -> None:
        """End the engine."""
        ...


class Permit:
    """The right to have requests in flight; released exactly once, however the answer ends."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Admission:
    """Decides whether there is room for a request, before any work is done for it."""

    def __init__(
        self, engine: Engine, config: ServerConfig, metrics: Metrics, occupancy: OwnOccupancy
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._occupancy = occupancy
        self.limit = config.max_concurrency
        self.draining = False

    @property
    def in_flight(self) -> int:
        """Requests being answered here."""
        return self._occupancy.in_flight

    @property
    def total(self) -> int:
        """Requests being answered by all API servers of this port."""
        return self._occupancy.table.in_flight()

    def enter(self, count: int) -> Permit:
        """A permit for `count` requests; 429 when there is no room, 503 when there is no engine."""
        try:
            self._check(count)
        except ApiError as error:
            reason = (
                "draining" if self.draining else {429: "queue_full"}.get(error.status, "engine")
            )
            self._metrics.rejected(reason)
            raise
        self._occupancy.change(count)
        return Permit(partial(self._leave, count))

    def _check(self, count: int) -> None:
        if self.draining:
            raise unavailable("the server is shutting down", DRAINING_RETRY_S)
        if count > self.limit:
            raise ApiError(400, f"one call may hold at most {self.limit} prompts", param="prompt")
        total = self.total
        if total + count > self.limit:
            raise too_busy(f"{total} requests are in flight; at most {self.limit} may be")
        try:
            self._engine.check_admission()
        except WorkerError as error:
            raise unavailable("the engine is not ready") from error

    def _leave(self, count: int) -> None:
        self._occupancy.change(-count)


class ServerState:
    """Built once per app by create_app."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: ServerConfig,
        limits: RequestLimits,
        compiler: GrammarCompiler | None = None,
        occupancy: OwnOccupancy | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.compiler = compiler
        self.metrics = Metrics(config.served_names[0] if config.served_names else "model")
        self.occupancy = occupancy or OwnOccupancy()
        self.admission = Admission(engine, config, self.metrics, self.occupancy)
        self.outputs = OutputProcessor(tokenizer)
        self.default_sampling = default_sampling_values(config.default_sampling)
        self.limits = limits
        self.reasoning_parser = parser_named("reasoning_parser", config.reasoning_parser)
        self.tool_parser = parser_named("tool_parser", config.tool_call_parser)
        self.threads = Threads(config.tokenizer_threads, config.max_concurrency, "tokenizer")
        # A template of a request may take as long as its process may live.
        self.template_threads = Threads(MAX_PROCESSES, MAX_WAITING_TEMPLATES, "template")

    async def add_grammar(self, request: Request) -> None:
        """Compile the request's constraint, if it has one, beside the event loop."""
        asked = request.sampling.structured_outputs
        if asked is None:
            return
        if self.compiler is None:
            raise InvalidRequest(
                "structured outputs are not available here", param="structured_outputs"
            )
        request.grammar = await self.compiler.compile_async(asked)
        request.grammar_backend = self.compiler.backend

    def check_model(self, name: str | None) -> str:
        """The model name for the answer; 404 for a model that this server does not have."""
        names = self.config.served_names
        if not name:
            return names[0]
        if self.config.verify_model_name and name not in names:
            raise ApiError(404, f"The model `{name[:128]}` does not exist.", param="model")
        return name

    def close(self) -> None:
        """Stop helper threads and processes; the engine belongs to its creator."""
        self.threads.close()
        self.template_threads.close()
