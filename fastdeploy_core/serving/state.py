"""What the routes of one app share: engine, tokenizer, limits, counters. There are no globals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.engine.input import RequestLimits, default_sampling_values
from fastdeploy_core.engine.media import MEDIA_THREADS
from fastdeploy_core.engine.output import OutputProcessor
from fastdeploy_core.errors import InvalidRequest, WorkerError
from fastdeploy_core.parsers.answer import parser_named
from fastdeploy_core.plugins.drivers import part
from fastdeploy_core.serving.front.occupancy import OwnOccupancy
from fastdeploy_core.serving.http.errors import ApiError, too_busy, unavailable
from fastdeploy_core.serving.http.threads import Threads

from .metrics import Metrics

if TYPE_CHECKING:
    from fastdeploy_core.contracts.model import MediaProcessor
    from fastdeploy_core.engine.client import AsyncEngine
    from fastdeploy_core.grammar.compiler import GrammarCompiler
    from fastdeploy_core.tokenizer import Tokenizer
    from fastdeploy_core.types import Request, SequenceExtras

DRAINING_RETRY_S = 5.0
PARSER_REST = 3.0  # the event loop has the interpreter to itself for three quarters of the time
RENDERED_AT_ONCE, MAX_WAITING_TEMPLATES = 4, 16  # templates of requests, a process each


class Admission:
    """Decides whether there is room for a request, before any work is done for it."""

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig, metrics: Metrics, occupancy: OwnOccupancy
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._occupancy = occupancy
        self.limit = config.max_concurrency

    @property
    def in_flight(self) -> int:
        """Requests being answered here."""
        return self._occupancy.in_flight

    @property
    def total(self) -> int:
        """Requests being answered by all API servers of this port."""
        return self._occupancy.table.in_flight()

    def enter(self, count: int) -> None:
        """Let `count` requests in, until `leave`; 429 without room, 503 without an engine."""
        try:
            self._check(count)
        except ApiError as error:
            reason = {429: "queue_full"}.get(error.status, "engine")
            self._metrics.rejected("draining" if self._occupancy.table.is_draining else reason)
            raise
        self._change(count)

    def _check(self, count: int) -> None:
        if self._occupancy.table.is_draining:
            raise unavailable("this server takes no new requests", DRAINING_RETRY_S)
        if count > self.limit:
            raise ApiError(400, f"one call may hold at most {self.limit} prompts", param="prompt")
        total = self.total
        if total + count > self.limit:
            raise too_busy(f"{total} requests are in flight; at most {self.limit} may be")
        try:
            self._engine.check_admission()
        except WorkerError as error:
            raise unavailable("the engine is not ready") from error

    def leave(self, count: int) -> None:
        """These requests have been answered, or will not be."""
        self._change(-count)

    def _change(self, count: int) -> None:
        self._occupancy.change(count)
        self._metrics.in_flight.set(self.in_flight)


class ServerState:
    """Built once per app by create_app."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        config: ServerConfig,
        limits: RequestLimits,
        compiler: GrammarCompiler | None = None,
        occupancy: OwnOccupancy | None = None,
        media: MediaProcessor | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.compiler = compiler
        self.media = media  # of a family that takes pictures
        self.adapters: Mapping[str, SequenceExtras] = {}  # by name, with --enable-lora
        self.metrics = Metrics(config.served_names[0] if config.served_names else "model")
        self.occupancy = occupancy or OwnOccupancy()
        self.admission = Admission(engine, config, self.metrics, self.occupancy)
        self.outputs = OutputProcessor(tokenizer)
        self.default_sampling = default_sampling_values(config.default_sampling)
        self.limits = limits
        self.reasoning_parser = parser_named("reasoning_parser", config.reasoning_parser)
        self.tool_parser = parser_named("tool_parser", config.tool_call_parser)
        self.threads = Threads(config.tokenizer_threads, config.max_concurrency, "tokenizer")
        # Large bodies: one thread, since parsers hold the interpreter, and the event loop waits.
        self.parsers = Threads(1, config.max_concurrency, "parser", PARSER_REST)
        # A template of a request may take as long as its process may live.
        self.template_threads = Threads(RENDERED_AT_ONCE, MAX_WAITING_TEMPLATES, "template")
        self.render_template: Callable[[str, Mapping[str, Any]], str] | None = None
        if config.trust_request_chat_template:
            self.render_template = part("request-templates", "--trust-request-chat-template")
        # Pictures are fetched and decoded for seconds, which no other prompt shall wait for.
        self.media_threads = Threads(MEDIA_THREADS, config.max_concurrency, "media")

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
        if not name:
            return self.model_names[0]
        if self.config.verify_model_name:
            self.check_name(name)
        return name

    def check_name(self, name: str) -> None:
        """404 for a name that this server does not have."""
        if name not in self.model_names:
            there_are = f"does not exist. There are: {', '.join(self.model_names)}."
            raise ApiError(404, f"The model `{name[:128]}` {there_are}", param="model")

    @property
    def model_names(self) -> list[str]:
        """What clients may ask for: the model, then its adapters."""
        return [*self.config.served_names, *self.adapters]

    def close(self) -> None:
        """Stop helper threads and processes; the engine belongs to its creator."""
        for pool in (self.threads, self.parsers, self.template_threads, self.media_threads):
            pool.close()
        if self.media is not None:
            self.media.close()
