"""One call of either API: runs the chat job and lets the API's writer show the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from fastdeploy_core.errors import RequestTooLong
from fastdeploy_core.serving.http.errors import ApiError, to_api_error
from fastdeploy_core.serving.openai.chat import ChatJob, Piece
from fastdeploy_core.serving.openai.usage import Usage
from fastdeploy_core.serving.state import ServerState

from .blocks import Blocks, Step
from .checks import named_as

Event = dict[str, Any]


class Writer(Protocol):
    """How an API shows an answer."""

    names: Mapping[str, str]  # the chat path's fields in this API's words
    is_cut: bool  # the answer ends where there is no room, so its last block is incomplete

    def begin(self, usage: Usage) -> Iterator[Event]:
        """The first step is done."""
        ...

    def step(self, step: Step) -> Iterator[Event]:
        """Something happened to a block."""
        ...

    def idle(self) -> Iterator[Event]:
        """A step added nothing that can be shown yet."""
        ...

    def end(self, last: Piece) -> Iterator[Event]:
        """The answer is complete."""
        ...

    def failed(self, error: ApiError) -> Event:
        """The answer breaks off."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed, after `end`."""
        ...


class AgentJob:
    """What `respond.answer` runs."""

    num_requests = 1

    def __init__(self, state: ServerState, tenant: str, chat: ChatJob, writer: Writer) -> None:
        self._state = state
        self._tenant = tenant
        self._chat = chat
        self._writer = writer
        self.stream = chat.stream

    async def prepare(self) -> None:
        """All work before the engine request."""
        try:
            with named_as(self._writer.names):
                await self._chat.prepare()
        except RequestTooLong as error:
            raise await self._state.threads.run(self._tenant, self._too_long) from error

    def _too_long(self) -> ApiError:
        """In words that agents look for before they shorten a conversation themselves."""
        limits, prompt = self._state.limits, self._chat.render()
        num_chars, param = len(prompt), self._writer.names["messages"]
        if num_chars > limits.max_chars or not isinstance(prompt, str):
            size = f"{num_chars} characters > {limits.max_chars} maximum"
        else:
            num_tokens = len(self._state.tokenizer.encode(prompt, False))
            # one token is left for the answer
            size = f"{num_tokens} tokens > {limits.max_model_len - 1} maximum"
        return ApiError(
            400,
            f"prompt is too long: {size}; shorten {param}, or start the "
            "server with a larger --max-model-len",
            param=param,
        )

    async def complete(self) -> dict[str, Any]:
        """The whole answer."""
        async with aclosing(self._made()) as events:
            async for _ in events:
                pass
        return self._writer.whole()

    async def events(self) -> AsyncGenerator[Event, None]:
        """The stream's events. A failure before the first one is raised, a later one is shown."""
        has_begun = False
        try:
            async with aclosing(self._made()) as events:
                async for event in events:
                    has_begun = True
                    yield event
        except Exception as error:
            if not has_begun:
                raise
            yield self._writer.failed(to_api_error(error))

    async def _made(self) -> AsyncGenerator[Event, None]:
        writer, blocks, last = self._writer, Blocks(), None
        async with aclosing(self._chat.pieces()) as pieces:
            async for piece in pieces:
                if last is None:
                    for event in writer.begin(piece.usage):
                        yield event
                last, is_idle = piece, True
                logprobs = piece.logprobs["content"] if piece.logprobs else ()
                for step in blocks.add(piece.said, logprobs):
                    is_idle = False
                    for event in writer.step(step):
                        yield event
                for event in writer.idle() if is_idle else ():
                    yield event
        writer.is_cut = last is not None and last.finish_reason == "length"
        for step in blocks.close():
            for event in writer.step(step):
                yield event
        if last is not None:
            for event in writer.end(last):
                yield event


async def frames(
    first: Event | None, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events named by their type, as both APIs have them; nothing follows the last."""
    try:
        if first is not None:
            yield _frame(first)
        async for event in events:
            yield _frame(event)
    finally:
        await events.aclose()


def _frame(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode("ascii"), msgspec.json.encode(event))
