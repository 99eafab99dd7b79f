"""Runs one engine request and yields its outputs; closing the generator aborts the request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastdeploy_core.errors import WorkerError
from fastdeploy_core.serving.metrics import RequestTimer
from fastdeploy_core.serving.state import ServerState
from fastdeploy_core.types import Request, RequestOutput

logger = logging.getLogger(__name__)

_MERGE_BUFFER = 4  # outputs per prompt that may wait for a reader


async def run(
    state: ServerState, request: Request, visible_tokens: Sequence[str] = (), chunk_tokens: int = 1
) -> AsyncGenerator[RequestOutput, None]:
    """Outputs of one request, each with what is new, as Engine.generate. Closing aborts it."""
    state.outputs.add(request, visible_tokens=visible_tokens)
    deltas: Any = state.engine.generate(request, chunk_tokens)
    if search := getattr(request.sampling, "search", None):  # of beams, by fd-beam-search
        deltas = search(request, state.engine)
    timer = state.metrics.start(request)
    finished = False
    try:
        async for delta in deltas:
            output, aborts = state.outputs.process(delta)
            if output is None:
                continue
            if aborts and not output.finished:
                state.engine.end_branches(aborts)
            timer.observe(output)
            finished = output.finished
            yield output
            if finished:  # a stop string may end an answer before the engine knows
                return
        if not finished:
            raise WorkerError("the engine ended a request without finishing it")
    except (GeneratorExit, asyncio.CancelledError):
        if not finished:
            state.metrics.aborted.inc()
        raise
    finally:
        state.outputs.remove(request.request_id)
        if state.config.log_requests:
            _log(request, timer)
        await deltas.aclose()


def _log(request: Request, timer: RequestTimer) -> None:
    """Sizes and times of a request; never its text."""
    now = time.monotonic()
    first_s = (timer.first_at or now) - timer.started_at
    logger.info(
        "request %s: %d prompt tokens, %d generated, %s, first after %.3f s, %.3f s in all",
        request.request_id,
        len(request.prompt_token_ids),
        timer.num_tokens,
        timer.finish_reasons,
        first_s,
        now - timer.started_at,
        extra={"request_id": request.request_id},
    )


async def merge(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several requests as they come, each with the number of its request."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]]
    queue = asyncio.Queue(_MERGE_BUFFER * len(streams))

    async def pump(number: int) -> None:
        try:
            async with aclosing(streams[number]) as stream:
                async for output in stream:
                    await queue.put((number, output))
        except Exception as error:
            await queue.put((number, error))
        else:
            await queue.put((number, None))

    tasks = [asyncio.create_task(pump(number)) for number in range(len(streams))]
    left = len(streams)
    try:
        while left:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
