"""What the routes of one app share: engine, tokenizer, limits, counters. There are no globals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.engine.input import RequestLimits, build_request_async, default_sampling_values
from fastdeploy_core.engine.output import OutputProcessor
from fastdeploy_core.errors import RequestTooLong, WorkerError
from fastdeploy_core.serving.front.occupancy import OwnOccupancy
from fastdeploy_core.serving.http.errors import ApiError, too_busy, unavailable

from .metrics import Metrics
from .parser_choice import load_parsers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastdeploy_core.grammar.compiler import GrammarCompiler
    from fastdeploy_core.tokenizer import Tokenizer
    from fastdeploy_core.types import Request, RequestOutputDelta, SamplingParams
    from fastdeploy_core.types.engine import EngineHealth, EngineInfo, EngineStats

Result = TypeVar("Result")
DRAINING_RETRY_S = 5.0
# texts up to this length are tokenized before they can be refused as too long
SURE_CHARS = 256 * 1024


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
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._most_chars = max(SURE_CHARS, longest * limits.max_model_len)
        self.reasoning_parser, self.tool_parser = load_parsers(config)
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, "tokenizer")

    async def in_thread(
        self, function: Callable[..., Result], *arguments: Any, **named: Any
    ) -> Result:
        """Run something slow in a thread, beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(function, *arguments, **named))

    async def engine_request(
        self, prompt: str | list[int], sampling: SamplingParams, **options: Any
    ) -> Request:
        """A checked engine request; a text that cannot fit is refused before it is tokenized."""
        cut = options.get("truncation") is not None
        if isinstance(prompt, str) and len(prompt) > self._most_chars and not cut:
            raise RequestTooLong(
                f"This model's maximum context length is {self.limits.max_model_len} tokens. "
                f"However, your prompt has {len(prompt)} characters, which are more tokens than "
                "that. Please shorten the prompt.",
                param="prompt",
            )
        return await build_request_async(
            prompt,
            sampling,
            tokenizer=self.tokenizer,
            limits=self.limits,
            compiler=self.compiler,
            **options,
        )

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
        self._threads.shutdown(wait=False, cancel_futures=True)
