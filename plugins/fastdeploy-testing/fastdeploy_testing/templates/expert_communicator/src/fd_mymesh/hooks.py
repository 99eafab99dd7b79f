"""Whether the communicator can serve these ranks. Imports no tensor library."""

from fastdeploy_core.contracts import Accept, Candidate, hookimpl
from fastdeploy_core.contracts.moe import ExpertQuestion


@hookimpl
def fd_expert_communicators(question: ExpertQuestion) -> list[Candidate]:
    """Any device: it runs over the device's own collectives."""
    return [Candidate("mymesh", Accept(0, "plain tensor code"))]
