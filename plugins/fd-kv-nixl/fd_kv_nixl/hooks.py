"""The NIXL transport's answer when two instances want to exchange KV blocks."""

from __future__ import annotations

from importlib.util import find_spec

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.kv_transport import TransportQuestion

_SCORE = 30


@hookimpl
def fd_kv_transport_for(question: TransportQuestion) -> Candidate | None:
    """Where it is asked for by name: the library has no authentication of its own."""
    if question.preferred not in ("", "nixl"):
        return None
    if find_spec("nixl") is None:
        return Candidate("nixl", Decline("the library is not installed: pip install nixl"))
    if not question.preferred:
        reason = "NIXL asks nobody who he is; trusted networks: --kv-transport nixl"
        return Candidate("nixl", Decline(reason))
    return Candidate("nixl", Accept(_SCORE, "by NIXL, through host memory"))
