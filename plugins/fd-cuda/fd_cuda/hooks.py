"""Answers at start-up. Imports no tensor library, and no vendor software until asked."""

from __future__ import annotations

from importlib.util import find_spec

from fastdeploy_core.contracts import Accept, Candidate, Decline, hookimpl
from fastdeploy_core.contracts.attention import AttentionQuestion, StateQuestion
from fastdeploy_core.contracts.device import DeviceQuestion
from fastdeploy_core.contracts.kv_formats import KV_FORMATS
from fastdeploy_core.contracts.kv_transport import TransportQuestion
from fastdeploy_core.contracts.moe import MoEQuestion

_SCORE = 150


@hookimpl
def fd_device_probe(question: DeviceQuestion) -> Candidate:
    """A driver with a GPU, and a tensor library that can use it."""
    from .probe import ask_driver, why_not_paddle, why_not_torch

    driver = ask_driver()
    if driver.error:
        return Candidate("cuda", Decline(driver.error))
    reasons: dict[str, str] = {}
    for library in ("torch", "paddle"):
        if question.tensor_library not in ("", library):
            continue
        is_torch = library == "torch"
        reasons[library] = why_not_torch(driver, opens=False) if is_torch else why_not_paddle()
        if not reasons[library]:
            gpus = f"{driver.num_gpus} x {driver.names[0]}"
            details = {
                "tensor_library": library,
                "gpu": gpus,
                "driver_cuda": ".".join(map(str, driver.version)),
            }
            return Candidate("cuda", Accept(_SCORE, gpus), details)
    why = "; ".join(f"{library}: {reason}" for library, reason in reasons.items())
    why = why or f"tensor library {question.tensor_library!r}; possible: torch, paddle"
    return Candidate("cuda", Decline(f"{driver.num_gpus} x {driver.names[0]}, but {why}"))


@hookimpl
def fd_attention_backends(question: AttentionQuestion) -> list[Candidate]:
    """Triton kernels on torch."""
    from .attention.question import why_not

    reason = why_not(question)
    answer = Decline(reason) if reason else Accept(_SCORE, "Triton kernels")
    is_quantized = question.kv_dtype in KV_FORMATS
    found = []
    for name, kind, quantized in (
        ("cuda_paged", "gqa", False),
        ("cuda_latent", "mla", False),
        ("cuda_quantized", "gqa", True),
        ("cuda_indexed", "mla", False),
    ):
        own = answer
        if question.spec.kind != kind:
            own = Decline(f"serves {kind} only")
        elif name == "cuda_indexed" and question.spec.index is None:
            own = Decline("serves layers with an indexer only")
        elif quantized != is_quantized and not reason:
            serves = "quantized caches only" if quantized else "the model's own numbers only"
            own = Decline(f"serves {serves}")
        found.append(Candidate(name, own))
    return found


@hookimpl
def fd_state_backends(question: StateQuestion) -> list[Candidate]:
    """Triton kernels on torch."""
    from .attention.question import why_not_state

    reason = why_not_state(question)
    answer = Decline(reason) if reason else Accept(_SCORE, "Triton kernels")
    return [Candidate("cuda_states", answer)]


@hookimpl
def fd_moe_backends(question: MoEQuestion) -> list[Candidate]:
    """Triton and CUDA C++ kernels on torch."""
    from .attention.question import why_not_triton

    reason = why_not_triton(question.device, question.tensor_library)
    verdict = Decline(reason) if reason else Accept(_SCORE, "grouped kernels")
    return [Candidate("cuda", verdict)]


@hookimpl
def fd_kv_transport_for(question: TransportQuestion) -> Candidate | None:
    """Between processes of one host, from GPU memory to GPU memory."""
    if question.preferred not in ("", "cuda_ipc"):
        return None
    if question.device != "cuda":
        reason = f"moves memory of cuda, not of {question.device}"
    elif not question.same_host:
        reason = "the peer is on another host"
    elif find_spec("fd_kv_tcp") is None:
        reason = "its connections are those of fd-kv-tcp: pip install fd-kv-tcp"
    elif not question.preferred:
        reason = (
            "takes GPU memory for blocks on their way, and both instances must see both GPUs: "
            "use --kv-transport cuda_ipc"
        )
    else:
        return Candidate("cuda_ipc", Accept(_SCORE, "from GPU memory to GPU memory"))
    return Candidate("cuda_ipc", Decline(reason))


@hookimpl
def fd_doctor_checks() -> list[tuple[str, bool, str]]:
    """Driver, tensor library, compiler of kernels."""
    from .probe import ask_driver, why_not_torch, why_not_triton

    driver = ask_driver()
    rows = [("NVIDIA driver and GPU", not driver.error, driver.error)]
    if not driver.error:
        reason = why_not_torch(driver)
        rows.append(("torch on the GPU", not reason, reason))
        reason = why_not_triton()
        rows.append(("triton", not reason, reason and f"{reason}; else the reference runs"))
    return rows
