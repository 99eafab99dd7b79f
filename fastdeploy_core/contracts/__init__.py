"""The public plugin API: Protocols, hookspecs, capabilities, named operations.

Importing it imports no tensor library, and pluggy only when a marker is asked for, so that
`fastdeploy plugins list` stays quick. A plugin may import this package, `fastdeploy_core.devices`,
`fastdeploy_core.types`, `fastdeploy_core.errors` and `fastdeploy_core.tensor`, and in its tests
`fastdeploy_testing`, a distribution of its own; everything else is private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import (
    CONTRACT,
    DISTRIBUTION,
    HOOK_GROUP,
    KINDS,
    Accept,
    ApiRoutes,
    Candidate,
    Decline,
    Kind,
    Requirements,
    Verdict,
)

if TYPE_CHECKING:
    from .hookspecs import hookimpl

__all__ = [
    "CONTRACT",
    "DISTRIBUTION",
    "HOOK_GROUP",
    "KINDS",
    "Accept",
    "ApiRoutes",
    "Candidate",
    "Decline",
    "Kind",
    "Requirements",
    "Verdict",
    "hookimpl",
]


def __getattr__(name: str) -> object:
    if name == "hookimpl":
        from .hookspecs import hookimpl

        return hookimpl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
