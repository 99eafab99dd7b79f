"""The public plugin API: Protocols, hookspecs, capabilities, named operations.

Importing it imports no tensor library. A plugin may import this package, `fastdeploy_core.types`,
`fastdeploy_core.errors`, `fastdeploy_core.tensor`, and `fastdeploy_core.testing` in its tests;
everything else is private.
"""

from .base import (
    CONTRACT,
    HOOK_GROUP,
    KINDS,
    Accept,
    Candidate,
    Decline,
    Kind,
    Requirements,
    Verdict,
)
from .hookspecs import hookimpl

__all__ = [
    "CONTRACT",
    "HOOK_GROUP",
    "KINDS",
    "Accept",
    "Candidate",
    "Decline",
    "Kind",
    "Requirements",
    "Verdict",
    "hookimpl",
]
