"""Answers to start-up questions. Imports no tensor library; the native module is loaded for the
probe."""

from __future__ import annotations

import platform
import sys

from fastdeploy_core.contracts.attention import AttentionQuestion
from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.device import DeviceQuestion
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.moe import MoEQuestion
from fastdeploy_core.tensor import LIBRARIES, available

NAME = "x86"
_ATTENTION, _EXPERTS = "x86_paged", "x86_experts"
# Above the reference, below any accelerator.
_DEVICE_SCORE = 20
_BACKEND_SCORE = 150


@hookimpl
def fd_device_probe(question: DeviceQuestion) -> Candidate:
    """Whether the native kernels can run here, and at which level."""
    machine = platform.machine().lower()
    if sys.platform != "linux" or machine not in ("x86_64", "amd64"):
        return Candidate(NAME, Decline(f"its kernels are for Linux on x86-64, not {machine}"))
    found = available()
    wanted = question.tensor_library
    if not found or (wanted and wanted not in found):
        what = f"tensor library {wanted!r} is not" if wanted else "no tensor library is"
        choice = wanted if wanted in LIBRARIES else "paddle"
        return Candidate(
            NAME, Decline(f'{what} installed; run: pip install "fastdeploy-core[{choice}]"')
        )
    try:
        from . import _native
    except ImportError as error:
        reason = (
            f"its native module does not load ({error}); run: pip install --force-reinstall fd-cpu"
        )
        return Candidate(NAME, Decline(reason))
    level, chosen = _native.available_isas()[-1], wanted or found[0]
    note = f"native kernels for {level}, memory by {chosen}"
    if level == "scalar":
        note += "; this processor has no AVX2, so they are slow"
    return Candidate(
        NAME, Accept(_DEVICE_SCORE, note), {"tensor_library": chosen, "instructions": level}
    )


@hookimpl
def fd_attention_backends(question: AttentionQuestion) -> list[Candidate]:
    """Grouped-query and latent attention over a cache in the model's dtype, the former in int8,
    too."""
    if question.device != NAME:
        return [Candidate(_ATTENTION, Decline(f"it runs on device {NAME} only"))]
    spec = question.spec
    if spec.kind not in ("gqa", "mla"):
        return [Candidate(_ATTENTION, Decline(f"kind {spec.kind!r}; possible: gqa, mla"))]
    formats = ("auto", spec.dtype, *(["int8"] if spec.kind == "gqa" else []))
    if question.kv_dtype not in formats:
        reason = f"cache format {question.kv_dtype!r}; possible: {', '.join(formats)}"
        return [Candidate(_ATTENTION, Decline(reason))]
    if spec.kind == "gqa" and spec.head_dim % 2 and spec.dtype != "float32":
        return [
            Candidate(_ATTENTION, Decline(f"heads {spec.head_dim} wide; possible: even numbers"))
        ]
    if question.block_size % 16:
        reason = f"KV blocks of {question.block_size} tokens; possible: multiples of 16"
        return [Candidate(_ATTENTION, Decline(reason))]
    return [
        Candidate(_ATTENTION, Accept(_BACKEND_SCORE, "native, rotation and cache write included"))
    ]


@hookimpl
def fd_moe_backends(question: MoEQuestion) -> list[Candidate]:
    """Experts whose number format the native products know."""
    if question.device != NAME:
        return [Candidate(_EXPERTS, Decline(f"it runs on device {NAME} only"))]
    from .formats import FORMATS

    formats = [name for name in question.quantization.split(",") if name]
    missing = [name for name in formats if name not in FORMATS]
    if missing:
        reason = f"experts in {', '.join(missing)}; possible: {', '.join(FORMATS)}, or unquantized"
        return [Candidate(_EXPERTS, Decline(reason))]
    return [Candidate(_EXPERTS, Accept(_BACKEND_SCORE, "native, grouped by expert"))]
