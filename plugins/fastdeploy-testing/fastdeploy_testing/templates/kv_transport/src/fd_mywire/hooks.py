"""Whether the transport can serve two instances. Imports no tensor library."""

from fastdeploy_core.contracts import Accept, Candidate, Decline, hookimpl
from fastdeploy_core.contracts.kv_transport import TransportQuestion


@hookimpl
def fd_kv_transport_for(question: TransportQuestion) -> Candidate | None:
    """Between processes of one host, and only where it is asked for by name."""
    if question.preferred != "mywire":
        return None
    if not question.same_host:
        return Candidate("mywire", Decline("the peer is on another host"))
    return Candidate("mywire", Accept(0, "through host memory"))
