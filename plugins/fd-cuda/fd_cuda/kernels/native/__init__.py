"""CUDA C++ kernels, compiled by NVRTC (a part of torch's CUDA builds) at first use and kept on
disk.

Only what a profile asked for is written so: products of few rows. Measured on an H200 at batch 8,
one layer's four products take 14 us here and 36 us as the best Triton kernels of the same fusion.
Nothing here needs nvcc. Where NVRTC or the card cannot do it, `available()` says so and callers use
cuBLAS and Triton.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import struct
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from fastdeploy_core.devices.host_device import usable_cores
from fastdeploy_core.errors import PluginError

from fd_cuda.kernels import rehearsal
from fd_cuda.kernels.common import INTERPRETED, has_pdl
from fd_cuda.settings import setting

logger = logging.getLogger(__name__)

PLAIN, ADD, GATED = range(3)
_HERE: Final = Path(__file__).parent
_INCLUDE: Final = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_OLDEST: Final = (8, 0)  # mma.sync on bfloat16
_ATTRIBUTE_CLUSTER: Final = 4
_ATTRIBUTE_PDL: Final = 6
_FUNCTION_SHARED_BYTES: Final = 8
_DIGEST_BYTES: Final = 32
_lock = threading.Lock()
_functions: dict[tuple[Any, ...], Function] = {}
_compiling: dict[Path, threading.Lock] = {}
_thread = threading.local()


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class _Call:
    """What launches of one kernel by one thread share. Packing arguments into memory that stays
    where it is costs a few microseconds a launch; making ctypes objects of them costs fifty."""

    __slots__ = ("config", "pack", "pointers", "values")

    def __init__(self, arguments: Sequence[Any], cluster: int) -> None:
        codes = [_code(argument) for argument in arguments]
        layout = struct.Struct("@" + "".join(codes))
        self.values = ctypes.create_string_buffer(layout.size)
        self.pack = functools.partial(layout.pack_into, self.values, 0)
        start = ctypes.addressof(self.values)
        ends = [struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes))]
        self.pointers = (ctypes.c_void_p * len(codes))(
            *(start + end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True))
        )
        attributes = (_Attribute * 2)()
        count = 0
        if has_pdl():
            attributes[count].id = _ATTRIBUTE_PDL
            attributes[count].value[0] = 1
            count += 1
        if cluster > 1:
            attributes[count].id = _ATTRIBUTE_CLUSTER
            attributes[count].value[0] = attributes[count].value[1] = 1
            attributes[count].value[2] = cluster
            count += 1
        self.config = _Config(attributes=attributes, num_attributes=count, by=1, bz=1)


def _code(argument: Any) -> str:
    """How `struct` spells the argument: pointers, 32-bit ints and floats, records as they are, or
    what ctypes says."""
    if isinstance(argument, bytes):
        return f"{len(argument)}s"
    if argument is None or isinstance(argument, torch.Tensor):
        return "P"
    if isinstance(argument, float):
        return "f"
    return "i" if isinstance(argument, int) else str(argument._type_)


@dataclass(slots=True)
class Function:
    """A specialization on one device; without a handle until it is loaded."""

    name: str
    defines: dict[str, int]
    device: int
    handle: ctypes.c_void_p | None = None
    # Bytes of shared memory that may be asked for at launch: of 48 KiB, kernels declare up to 16
    # themselves.
    most_shared: int = 32 * 1024
    calls: dict[tuple[int, int], _Call] = field(default_factory=dict)  # by thread and cluster


def _why_not() -> str:
    """Why these kernels cannot be used; empty if they can."""
    if INTERPRETED or not torch.cuda.is_available():
        return "no GPU"
    if setting("FD_CUDA_NATIVE") != "1":
        return "switched off by FD_CUDA_NATIVE"
    if torch.cuda.get_device_capability() < _OLDEST:
        return f"the GPU is older than compute capability {_OLDEST[0]}.{_OLDEST[1]}"
    try:
        _driver()
        _nvrtc()
        # Whether a compiler knows this card is found out by trying.
        trial = {"HALF": 0, "EPILOGUE": PLAIN, "PDL": 0, "NORM": 0}
        _compile("gemv", {**trial, "K": 64, "TILES": 1, "WARPS": 1, "AHEAD": 1})
    except OSError as error:
        return f"NVRTC was not found: {error}"
    except PluginError as error:
        return str(error)
    return ""


@functools.cache
def available() -> bool:
    """Whether these kernels can be used; the reason why not is logged once."""
    reason = _why_not()
    if reason and not INTERPRETED:
        logger.warning("native CUDA kernels are not used: %s; cuBLAS and Triton do it all", reason)
    return not reason


@functools.cache
def has_wgmma() -> bool:
    """Whether gemm.cu and filter.cu run on the card, Hopper's: newer ones have no wgmma."""
    return available() and torch.cuda.get_device_capability()[0] == 9


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    for folder in (*sys.path, str(Path(torch.__file__).parent / "lib")):
        for pattern in ("nvidia/*/lib/libnvrtc.so*", "libnvrtc*.so*"):
            found = sorted(str(path) for path in Path(folder).glob(pattern))
            names[:0] = [name for name in found if "builtins" not in name]
    error: OSError | None = None
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as failure:
            error = failure
    raise OSError(f"{', '.join(names)}: {error}")


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "fastdeploy" / "cuda"


@functools.cache
def source_of(name: str) -> str:
    """The file with what it includes in place: NVRTC looks into no folders."""
    text = (_HERE / name).read_text("utf-8")
    return _INCLUDE.sub(lambda match: source_of(match[1]), text)


def compile_ahead(name: str, defines: dict[str, int]) -> None:
    """Start to compile a specialization that will be asked for; nothing happens if it cannot be."""
    _compilers().submit(_compile, name, {**defines, "PDL": int(has_pdl())})


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    """Threads, each busy with one kernel."""
    return ThreadPoolExecutor(max(1, usable_cores() - 1), "fd-cuda-compile")


def _compile(name: str, defines: dict[str, int]) -> bytes:
    """Machine code of one specialization, from the cache folder where it has been made before."""
    major, minor = torch.cuda.get_device_capability()
    suffix = "a" if (major, minor) >= (9, 0) else ""
    options = [
        f"--gpu-architecture=sm_{major}{minor}{suffix}",
        "--std=c++17",
        *(f"-D{key}={value}" for key, value in sorted(defines.items())),
    ]
    source, nvrtc = source_of(f"{name}.cu"), _nvrtc()
    version = (ctypes.c_int * 2)()
    nvrtc.nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, 4))
    key = hashlib.sha256("\0".join([source, *options, *map(str, version)]).encode()).hexdigest()
    path = cache_folder() / f"{name}-{key[:32]}.cubin"
    with _compiling.setdefault(path, threading.Lock()):  # another thread may be at it
        return _kept(path) or _compile_now(name, source, options, path)


def _kept(path: Path) -> bytes:
    """Machine code that was kept, after its SHA-256; empty where there is none or a disk has
    changed it."""
    try:
        held = path.read_bytes()
    except OSError:
        return b""
    digest, code = held[:_DIGEST_BYTES], held[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else b""


def _compile_now(name: str, source: str, options: list[str], path: Path) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), 0, None, None
        ),
        name,
    )
    encoded = [option.encode() for option in options]
    code = nvrtc.nvrtcCompileProgram(
        program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
    )
    size = ctypes.c_size_t()
    if code:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, text)
        raise PluginError(
            f"kernel {name} of fd-cuda cannot be compiled with {' '.join(options)}: "
            f"{text.value.decode('utf-8', 'replace')[:2000]}; FD_CUDA_NATIVE=0 does without it"
        )
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    try:  # whole or not at all: other processes may read it at any time
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin.raw).digest() + cubin.raw)
        Path(file.name).replace(path)
    except OSError as error:
        logger.info("compiled kernels are not kept in %s: %s", path.parent, error)
    return cubin.raw


def enter(device: int) -> None:
    """Make the device's context the calling thread's; torch does so only when it launches
    something."""
    if getattr(_thread, "device", None) == device:
        return
    driver, handle, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuInit(0), "context")
    _check(driver.cuDeviceGet(ctypes.byref(handle), device), "context")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "context")
    _check(driver.cuCtxSetCurrent(context), "context")
    _thread.device = device


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        message = text.value.decode() if text.value else "unknown"
        raise RuntimeError(f"CUDA error: {message} (code {code}, kernel {what})")


def function(name: str, defines: dict[str, int]) -> Function:
    """The kernel `name` of name.cu, specialized; compiled and loaded at the first call, or where
    nothing is to run yet, being compiled."""
    device = torch.cuda.current_device()
    key = (device, name, *sorted(defines.items()))
    found = _functions.get(key)
    if found is None:
        with _lock:
            found = _functions.setdefault(key, Function(name, defines, device))
    if found.handle is None:
        if rehearsal.is_on():
            compile_ahead(name, defines)
        else:
            _load(found)
    return found


def load_met() -> None:
    """Load what was met on this device while nothing was to run, so that serving finds it."""
    device = torch.cuda.current_device()
    for kernel in list(_functions.values()):
        if kernel.device == device and kernel.handle is None:
            with suppress(Exception):  # whoever launches it hears why it cannot be
                _load(kernel)


def _load(kernel: Function) -> None:
    cubin = _compile(kernel.name, {**kernel.defines, "PDL": int(has_pdl())})
    with _lock:
        if kernel.handle is None:
            enter(kernel.device)
            driver, module, handle = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
            name = kernel.name
            _check(driver.cuModuleLoadData(ctypes.byref(module), cubin), name)
            _check(driver.cuModuleGetFunction(ctypes.byref(handle), module, name.encode()), name)
            kernel.handle = handle


def launch(
    kernel: Function,
    grid: tuple[int, int, int],
    threads: int,
    arguments: Sequence[Any],
    *,
    shared: int = 0,
    cluster: int = 1,
) -> None:
    """Queue it on the current stream. Arguments: tensors or None, ctypes values, ints as 32 bits,
    floats as 32 bits, bytes as a record. `cluster`: blocks of a cluster along z."""
    if rehearsal.is_on():
        return
    if kernel.handle is None:
        _load(kernel)
    device = torch.cuda.current_device()
    enter(device)
    if shared > kernel.most_shared:
        _check(
            _driver().cuFuncSetAttribute(kernel.handle, _FUNCTION_SHARED_BYTES, shared), "attribute"
        )
        kernel.most_shared = shared
    key = (threading.get_ident(), cluster)
    call = kernel.calls.get(key)
    if call is None:
        call = kernel.calls[key] = _Call(arguments, cluster)
    call.pack(*map(_value, arguments))
    config = call.config
    config.gx, config.gy, config.gz = grid
    config.bx, config.shared = threads, shared
    config.stream = torch._C._cuda_getCurrentRawStream(device)
    code = _launcher()(ctypes.byref(config), kernel.handle, call.pointers, None)
    if code:
        _check(code, kernel.name)


@functools.cache
def _launcher() -> Any:
    return _driver().cuLaunchKernelEx


def _value(argument: Any) -> Any:
    """The number that is packed for it."""
    if argument is None:
        return 0
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return getattr(argument, "value", argument)
