"""The Mooncake transport's answer when two instances want to exchange KV blocks."""

from __future__ import annotations

from importlib.util import find_spec

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.kv_transport import TransportQuestion

_SCORE = 30


@hookimpl
def fd_kv_transport_for(question: TransportQuestion) -> Candidate | None:
    """Where it is asked for by name: the library has no authentication of its own."""
    if question.preferred not in ("", "mooncake"):
        return None
    if find_spec("mooncake") is None:
        return Candidate(
            "mooncake",
            Decline("the library is not installed: pip install mooncake-transfer-engine"),
        )
    if not question.preferred:
        reason = (
            "who reaches its port may read and write; trusted networks: --kv-transport mooncake"
        )
        return Candidate("mooncake", Decline(reason))
    return Candidate("mooncake", Accept(_SCORE, "by Mooncake, through host memory"))
