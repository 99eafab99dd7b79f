"""One API call: its prompts through the engine, a window of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from fastdeploy_core.engine.input import RequestOptions
from fastdeploy_core.errors import WorkerError
from fastdeploy_core.serving.openai.generation import run
from fastdeploy_core.serving.openai.usage import Call
from fastdeploy_core.serving.state import ServerState
from fastdeploy_core.types import Request

from .prompts import Prompter
from .requests import pooled_requests
from .schemas import PoolingFields
from .settings import PoolingSettings
from .vectors import finished

# Requests of one call that are in the engine at once: enough to fill its steps, and no more, so
# that a call with 2048 texts takes a share of the places there are.
WINDOW = 64

Prompts = Callable[[Prompter], list[list[int]]]
Vectors = list[np.ndarray]


class PoolingJob:
    """serving.respond.Job. `make` turns the body into prompts, `render` [width] vectors, one for
    each prompt ([steps, width] with STEP), and the number of prompt tokens into an answer."""

    stream = False

    def __init__(
        self,
        state: ServerState,
        body: PoolingFields,
        call: Call,
        count: int,
        make: Prompts,
        render: Callable[[Vectors, int], dict[str, Any]],
        dimensions: int | None = None,
        param: str = "input",
    ) -> None:
        self._state, self._body, self._call = state, body, call
        self._make, self._render = make, render
        self._dimensions, self._param = dimensions, param
        self.settings = PoolingSettings.of(state.config.pooling)
        self.num_requests = min(count, WINDOW, state.admission.limit)
        self._requests: list[list[Request]] = []
        self._num_tokens = 0  # of all prompts

    async def prepare(self) -> None:
        """Tokenize."""
        await self._state.threads.run(self._call.tenant, self._make_requests)

    def _make_requests(self) -> None:
        state, body, call = self._state, self._body, self._call
        prompter = Prompter(self.settings, state.tokenizer, state.limits)
        limits = [t for t in (state.config.request_timeout_s, call.timeout_s) if t is not None]
        options = RequestOptions(
            priority=body.priority or 0,
            deadline_s=min(limits, default=None),
            tenant=call.tenant,
            cache_salt=body.cache_salt or "",
            salt_scope="" if state.config.share_prefix_cache else call.tenant,
            log_id=call.id,
        )
        prompts = self._make(prompter)
        self._num_tokens = sum(map(len, prompts))
        self._requests = pooled_requests(
            prompts, self.settings, prompter, state.limits, options, self._param
        )

    async def complete(self) -> dict[str, Any]:
        """The whole answer."""
        flat = [request for requests in self._requests for request in requests]
        pooled = iter(await self._pool(flat))
        vectors: Vectors = []
        for requests in self._requests:
            own = [
                finished(
                    self.settings,
                    next(pooled),
                    dimensions=self._dimensions,
                    is_raw=self._body.is_raw,
                )
                for _ in requests
            ]
            vectors.append(np.stack(own) if self.settings.pooling_type == "STEP" else own[0])
        return self._render(vectors, self._num_tokens)

    async def _pool(self, requests: Sequence[Request]) -> list[bytes]:
        """In order. The first failure ends all of them."""
        window = asyncio.Semaphore(self.num_requests)

        async def one(request: Request) -> bytes:
            async with window, aclosing(run(self._state, request)) as outputs:
                async for output in outputs:
                    if output.outputs and output.outputs[0].pooled is not None:
                        return output.outputs[0].pooled
            raise WorkerError("the engine ended a request without pooling it")

        tasks = [asyncio.create_task(one(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """There is no stream."""
        raise NotImplementedError("vectors are not streamed")
