"""Whether the driver can serve a layer. Imports no tensor library."""

from fastdeploy_core.contracts import Accept, Candidate, Decline, hookimpl
from fastdeploy_core.contracts.attention import AttentionQuestion


@hookimpl
def fd_attention_backends(question: AttentionQuestion) -> list[Candidate]:
    """Plain attention on the device `cpu`; a score below 100 says that it works, no more."""
    spec, reason = question.spec, ""
    if question.device != "cpu":
        reason = f"runs on device 'cpu', not {question.device!r}"
    elif spec.kind != "gqa":
        reason = f"kind {spec.kind!r}; possible: gqa"
    elif spec.kv_format:
        reason = f"a cache of {spec.kv_format}; possible: the model's dtype"
    elif spec.head_norms:
        reason = "heads that are normalised"
    return [Candidate("myflash", Decline(reason) if reason else Accept(0, "row by row"))]
