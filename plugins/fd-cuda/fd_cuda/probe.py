"""Whether there is an NVIDIA GPU that the installed software can use. Answers in words, never
raises.

The driver is asked through its own library with ctypes. So a missing or broken tensor library does
not hide what the machine has, and the other way round.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

_DRIVER_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
_OLDEST = (8, 0)
_CAPABILITY = (75, 76)  # cuDeviceGetAttribute: major, minor
# Results of cuInit, in words that an operator can act on.
_INIT_ERRORS = {
    3: "the driver is not initialised",
    34: "the library found is a stub without a driver",
    36: "GPUs are in exclusive use by another process",
    46: "GPUs are busy or unavailable",
    100: "the driver sees no GPU; check CUDA_VISIBLE_DEVICES and whether the container was given "
    "one",
    101: "CUDA_VISIBLE_DEVICES names a GPU that does not exist",
    802: "the fabric manager has not started",
    803: "driver library and kernel module have different versions; reboot or reinstall the driver",
    804: "the forward-compatibility library does not support this GPU; remove it",
    999: "the driver failed; see dmesg for lines with NVRM or Xid",
}


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's answer. `error` is empty if there is at least one GPU."""

    version: tuple[int, int] = (0, 0)  # the newest CUDA version that it can run
    num_gpus: int = 0
    names: tuple[str, ...] = ()
    error: str = ""


def ask_driver() -> Driver:
    """Versions and GPUs, through libcuda."""
    library = None
    for name in _DRIVER_LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            break
        except OSError:
            continue
    if library is None:
        return Driver(error="no NVIDIA driver is installed (libcuda.so.1 was not found)")
    code = library.cuInit(0)
    if code:
        words = _INIT_ERRORS.get(code, "the driver could not be initialised")
        return Driver(error=f"{words} (cuInit returned {code})")
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for index in range(count.value):
        handle, text = ctypes.c_int(), ctypes.create_string_buffer(256)
        if not library.cuDeviceGet(ctypes.byref(handle), index):
            library.cuDeviceGetName(text, 256, handle)
        names.append(text.value.decode("ascii", "replace"))
    error = "" if count.value else _INIT_ERRORS[100]
    newest = (version.value // 1000, version.value % 1000 // 10)
    return Driver(newest, count.value, tuple(names), error)


@functools.cache
def capability() -> tuple[int, int]:
    """The first GPU's compute capability; (0, 0) without a GPU."""
    if ask_driver().error:
        return (0, 0)
    library, found = ctypes.CDLL("libcuda.so.1"), [ctypes.c_int(), ctypes.c_int()]
    handle = ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(handle), 0)
    for attribute, value in zip(_CAPABILITY, found, strict=True):
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    return found[0].value, found[1].value


def c_compiler() -> str:
    """The C compiler with which Triton builds what launches its kernels; empty: there is none."""
    asked = os.environ.get("CC")
    found = (shutil.which(name) for name in ([asked] if asked else ["gcc", "clang"]))
    return next((path for path in found if path), "")


def why_not_triton() -> str:
    """Why Triton kernels cannot run; empty if they can. Without a GPU they are interpreted, or
    compiled for another machine."""
    if not has_triton():
        return "triton is not installed; run: pip install triton"
    if capability() == (0, 0):
        return ""
    if capability() < _OLDEST:
        return f"the GPU has compute capability {_text(capability())}; Triton needs 8.0"
    if not c_compiler():
        return (
            "Triton needs a C compiler and found neither gcc nor clang, nor what CC names; install "
            "one (Debian, Ubuntu: apt-get install gcc libc6-dev; Fedora: dnf install gcc)"
        )
    return ""


def why_not_torch(driver: Driver, *, opens: bool = True) -> str:
    """Why torch cannot use the driver's GPUs; empty if it can. Without `opens` only torch's files
    are read, because importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return "torch is not installed; install a CUDA build of it (torch>=2.8)"
    built = _built_for(spec.origin)
    if opens or built is None:
        try:
            import torch
        except Exception as error:
            return f"torch cannot be imported: {type(error).__name__}: {error}"
        built = torch.__version__, torch.version.cuda or ""
    version, cuda = built
    if not cuda:
        return (
            f"torch {version} is built without CUDA; install a CUDA build that the driver can run "
            f"(CUDA {_text(driver.version)} or older)"
        )
    # Within one major version a newer build runs on an older driver of at least that major version.
    if driver.version[0] < int(cuda.partition(".")[0]):
        return (
            f"the driver is too old: it runs CUDA {_text(driver.version)} and older, torch "
            f"{version} is "
            f"built for CUDA {cuda}; update the driver or install an older CUDA build of torch"
        )
    return _why_not_opened() if opens else ""


def _built_for(origin: str | None) -> tuple[str, str] | None:
    """(torch's version, the CUDA it is built for or nothing), as its version.py says."""
    try:
        text = Path(origin or "").with_name("version.py").read_text("utf-8")
    except OSError:
        return None
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*= (?:None|'([\d.]+)')", text, re.MULTILINE)
    return None if version is None or cuda is None else (version[1], cuda[1] or "")


def _why_not_opened() -> str:
    import torch

    try:
        if not torch.cuda.is_available():
            return "torch.cuda.is_available() is False although the driver sees a GPU"
    except Exception as error:
        return f"torch cannot open the GPU: {type(error).__name__}: {error}"
    return ""


def why_not_paddle() -> str:
    """Why PaddlePaddle cannot use the GPUs; empty if it can."""
    if importlib.util.find_spec("paddle") is None:
        return "paddlepaddle-gpu is not installed"
    try:
        import paddle

        if not paddle.is_compiled_with_cuda():
            return f"paddle {paddle.__version__} is built without CUDA; install paddlepaddle-gpu"
        if not paddle.device.cuda.device_count():
            return "paddle sees no GPU"
    except Exception as error:
        return f"paddle cannot be used: {type(error).__name__}: {error}"
    return ""


def has_triton() -> bool:
    """Whether kernels can be compiled; without it the reference operations run."""
    return importlib.util.find_spec("triton") is not None


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
