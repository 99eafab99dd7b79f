"""What a call knows of its connection, for what would be slow or impossible through ASGI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope

# An extension of the scope that protocol.py sets to the Connection.
CONNECTION_EXTENSION = "fastdeploy.connection"


class Connection(Protocol):
    """The connection below ASGI, for what would be slow or impossible through `send`."""

    @property
    def has_body(self) -> bool:
        """Whether the whole body of the request has come."""
        ...

    def abort(self) -> None:
        """Close at once, without waiting for what it still has to send."""
        ...

    def write(self, data: bytes) -> bool:
        """A part, not empty, of a body that has no declared length, after the head was sent to a
        client that knows chunks (HTTP/1.1). True: the client does not keep up, wait for `drain`."""
        ...

    async def drain(self) -> None:
        """Wait until the client has read enough."""
        ...

    def watch(self, on_left: Callable[[], None] | None) -> None:
        """Call this once the client leaves before it has its answer; None: nothing any more."""
        ...


def connection_of(scope: Scope) -> Connection | None:
    """None for a call that came over no connection."""
    connection: Connection | None = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
    return connection
