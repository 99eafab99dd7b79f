"""Work for a client ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fastdeploy_core.serving.respond import WhileConnected


class Client:
    """A connection that ends when it is told to."""

    def __init__(self) -> None:
        self._on_left: Callable[[], None] | None = None

    def watch(self, on_left: Callable[[], None] | None) -> None:
        self._on_left = on_left

    def leave(self) -> None:
        if self._on_left is not None:
            self._on_left()


def test_work_ends_when_its_client_leaves_and_the_task_goes_on() -> None:
    async def main() -> list[str]:
        client, seen = Client(), []
        asyncio.get_running_loop().call_later(0.01, client.leave)
        async with WhileConnected(client):
            try:
                await asyncio.sleep(60)
            finally:
                seen.append("work ended")
        await asyncio.sleep(0)
        return [*seen, "task went on"]

    assert asyncio.run(main()) == ["work ended", "task went on"]


def test_a_client_that_leaves_behind_the_block_ends_nothing() -> None:
    async def main() -> None:
        client = Client()
        async with WhileConnected(client):
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(client.leave)
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(main())


def test_errors_of_the_work_and_whoever_else_cancels_it_are_not_swallowed() -> None:
    async def fail() -> None:
        async with WhileConnected(Client()):
            raise ValueError("as it is")

    async def wait(client: Client) -> None:
        async with WhileConnected(client):
            await asyncio.sleep(60)

    async def main() -> None:
        with pytest.raises(ValueError, match="as it is"):
            await fail()
        client = Client()
        task = asyncio.create_task(wait(client))
        await asyncio.sleep(0.01)
        client.leave()  # and at the same time
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await wait(Client())

    asyncio.run(main())
