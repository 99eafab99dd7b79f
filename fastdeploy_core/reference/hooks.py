"""The reference's answers to start-up hooks. Imports no tensor library."""

from __future__ import annotations

from fastdeploy_core.contracts.attention import AttentionQuestion
from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.device import DeviceQuestion
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.kv_formats import KV_ALIASES, KV_FORMATS
from fastdeploy_core.contracts.moe import MoEQuestion
from fastdeploy_core.tensor import LIBRARIES, available

# Lower than any accelerator's score: the reference is chosen when nothing better is there.
_DEVICE_SCORE = 1
_BACKEND_SCORE = 10


@hookimpl
def fd_device_probe(question: DeviceQuestion) -> Candidate:
    """A CPU is always there; what may be missing is a tensor library."""
    found = available()
    wanted = question.tensor_library
    if wanted and wanted not in found:
        choice = ", ".join(found) or "none"
        reason = f"tensor library {wanted!r} is not installed; installed: {choice}"
        if wanted in LIBRARIES:
            reason += f'; run: pip install "fastdeploy-core[{wanted}]"'
        return Candidate("cpu", Decline(reason))
    if not found:
        return Candidate(
            "cpu",
            Decline('no tensor library is installed; run: pip install "fastdeploy-core[paddle]"'),
        )
    chosen = wanted or found[0]
    details = {"tensor_library": chosen, "installed": ", ".join(found)}
    note = f"on {chosen}, exact and slow; docs/how-to/cpu.md says how to get native kernels"
    return Candidate("cpu", Accept(_DEVICE_SCORE, note), details)


@hookimpl
def fd_attention_backends(question: AttentionQuestion) -> list[Candidate]:
    """The reference serves every attention of the contract."""
    spec = question.spec
    if spec.kind not in ("gqa", "mla"):
        return [Candidate("reference", Decline(f"kind {spec.kind!r}; possible: gqa, mla"))]
    wanted = question.kv_dtype
    if wanted not in ("auto", spec.dtype, *KV_FORMATS, *KV_ALIASES):
        possible = ", ".join(("auto", spec.dtype, *KV_FORMATS))
        return [Candidate("reference", Decline(f"cache format {wanted!r}; possible: {possible}"))]
    return [Candidate("reference", Accept(_BACKEND_SCORE, "plain tensor code"))]


@hookimpl
def fd_moe_backends(question: MoEQuestion) -> list[Candidate]:
    """The reference serves every mixture of experts; it dequantizes formats without a kernel."""
    note = f"experts in {question.quantization}" if question.quantization else "plain tensor code"
    return [Candidate("reference", Accept(_BACKEND_SCORE, note))]
