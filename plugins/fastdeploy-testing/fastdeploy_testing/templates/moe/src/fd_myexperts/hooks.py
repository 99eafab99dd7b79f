"""Whether the driver can serve a model's experts. Imports no tensor library."""

from fastdeploy_core.contracts import Accept, Candidate, Decline, hookimpl
from fastdeploy_core.contracts.moe import MoEQuestion


@hookimpl
def fd_moe_backends(question: MoEQuestion) -> list[Candidate]:
    """Experts in full precision on the device `cpu`."""
    reason = ""
    if question.device != "cpu":
        reason = f"runs on device 'cpu', not {question.device!r}"
    elif question.quantization:
        reason = f"experts of {question.quantization}; possible: full precision"
    return [Candidate("myexperts", Decline(reason) if reason else Accept(0, "one by one"))]
