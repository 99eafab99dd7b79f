"""The TCP transport's answer when two instances want to exchange KV blocks."""

from __future__ import annotations

from fastdeploy_core.contracts.base import Accept, Candidate
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.kv_transport import TransportQuestion

_SCORE = 10  # below whatever does without a network


@hookimpl
def fd_kv_transport_for(question: TransportQuestion) -> Candidate | None:
    """Between any two processes, through host memory."""
    if question.preferred not in ("", "tcp"):
        return None
    return Candidate("tcp", Accept(_SCORE, "through host memory and the network"))
