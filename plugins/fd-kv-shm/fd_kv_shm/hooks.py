"""The shared-memory transport's answer when two instances want to exchange KV blocks."""

from __future__ import annotations

import os

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.kv_transport import TransportQuestion

# Above anything that needs a network, below what moves device memory directly.
_SCORE = 50


@hookimpl
def fd_kv_transport_for(question: TransportQuestion) -> Candidate | None:
    """Between processes of one host, through host memory."""
    if question.preferred not in ("", "shm"):
        return None
    if not question.same_host:
        return (
            Candidate("shm", Decline("the peer is on another host")) if question.preferred else None
        )
    if not hasattr(os, "memfd_create"):
        return Candidate("shm", Decline("this operating system has no memfd_create"))
    return Candidate("shm", Accept(_SCORE, "through host memory"))
