"""Recognises errors that mean: GPU memory ran out, or the GPU is lost for this process.

Errors of the second kind are sticky: every later call of the process fails, so only a new process
helps. Libraries report them as exceptions of their own with the CUDA runtime's text or number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_OOM_TEXTS: Final = (
    "cuda out of memory",
    "cuda error: out of memory",
    "cudaerrormemoryallocation",
    "cuda_error_out_of_memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "out of memory error on gpu",  # paddle
    "resourceexhausted",  # paddle
    "triton error [cuda]: out of memory",
    "failed to cuda calloc",  # nccl
)
# Numbers of cudaError_t.
_LOST_CODES: Final = frozenset(
    {
        46,  # devices unavailable
        100,  # no device any more
        101,  # its number is not valid any more
        214,  # uncorrectable memory error
        220,  # NVLink error
        700,  # illegal address
        702,  # launch timed out
        708,  # context is destroyed
        709,  # context is destroyed
        710,  # assertion on the device
        713,  # hardware
        714,  # hardware stack
        715,  # illegal instruction
        716,  # misaligned address
        717,  # invalid address space
        718,  # invalid program counter
        719,  # launch failure
        721,  # error contained in a process
        802,  # system not ready
        999,  # unknown
    }
)
_LOST_TEXTS: Final = (
    "an illegal memory access was encountered",
    "unspecified launch failure",
    "device-side assert triggered",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "the launch timed out and was terminated",
    "misaligned address",
    "an illegal instruction was encountered",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "context is destroyed",
    "driver shutting down",
    "no cuda-capable device is detected",
    "cuda-capable device(s) is/are busy or unavailable",
    "gpu is lost",
    "fallen off the bus",
    "cuda error: unknown error",
    "cublas_status_execution_failed",
    "cudnn_status_execution_failed",
)
# What the product library says where it found no memory for itself, and where the GPU is lost.
_DOUBTFUL: Final = "cublas_status_internal_error"


def is_oom(error: BaseException, answers: Callable[[], bool]) -> bool:
    """Whether the error means that the GPU's memory ran out; smaller steps may fit. answers: asks
    whether the GPU still does what it is told."""
    if type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch"):
        return True
    if getattr(error, "error_code", None) == 2 and _is_cuda(error):
        return True
    text = str(error).lower()
    return any(known in text for known in _OOM_TEXTS) or (_DOUBTFUL in text and answers())


def is_lost(error: BaseException, answers: Callable[[], bool]) -> bool:
    """Whether the error means that this process cannot use the GPU any more."""
    if is_oom(error, answers):
        return False
    if _is_cuda(error) and getattr(error, "error_code", 0) in _LOST_CODES:
        return True
    text = str(error).lower()
    return _DOUBTFUL in text or any(known in text for known in _LOST_TEXTS)


def _is_cuda(error: BaseException) -> bool:
    """torch.AcceleratorError carries the runtime's number."""
    return type(error).__name__ == "AcceleratorError"
