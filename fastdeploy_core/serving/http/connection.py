"""A call's access to its connection, for what ASGI makes slow or impossible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope

# protocol.py puts the Connection into the scope under this name.
CONNECTION_EXTENSION = "fastdeploy.connection"


class Connection(Protocol):
    """The connection below ASGI, for what `send` makes slow or impossible."""

    @property
    def has_body(self) -> bool:
        """Whether the request's whole body has arrived."""
        ...

    def abort(self) -> None:
        """Close at once and drop what is not sent yet."""
        ...

    def write(self, data: bytes) -> bool:
        """Send a non-empty part of a body without declared length, after the head, to a client that
        knows chunks (HTTP/1.1). True: the client reads too slowly; wait for `drain`."""
        ...

    async def drain(self) -> None:
        """Wait until the client has read enough for more."""
        ...

    def watch(self, on_left: Callable[[], None] | None) -> None:
        """Call on_left once if the client leaves before its answer is complete; None: stop
        watching."""
        ...


def connection_of(scope: Scope) -> Connection | None:
    """The Connection of a call; None if the call came without a connection."""
    connection: Connection | None = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
    return connection
