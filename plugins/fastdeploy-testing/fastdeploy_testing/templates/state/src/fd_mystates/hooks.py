"""Whether the driver can serve a layer. Imports no tensor library."""

from fastdeploy_core.contracts import Accept, Candidate, Decline, hookimpl
from fastdeploy_core.contracts.attention import StateQuestion


@hookimpl
def fd_state_backends(question: StateQuestion) -> list[Candidate]:
    """Short convolutions on the device `cpu`; a score below 100 says that it works, no more."""
    reason = ""
    if question.device != "cpu":
        reason = f"runs on device 'cpu', not {question.device!r}"
    elif question.spec.kind != "short_conv":
        reason = f"kind {question.spec.kind!r}; possible: short_conv"
    return [Candidate("mystates", Decline(reason) if reason else Accept(0, "row by row"))]
