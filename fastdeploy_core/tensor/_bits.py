"""Host-side helpers of both libraries: number formats that numpy lacks, and the C allocator."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

# dtype without a numpy equivalent -> the unsigned integer type that holds its bits in numpy
BIT_CARRIERS: Final[dict[str, str]] = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
}

_MKL_CODE_VARIABLE = "MKL_DEBUG_CPU_TYPE"
_M_TRIM_THRESHOLD = -1  # glibc mallopt parameters
_M_MMAP_THRESHOLD = -3
_MAX_MMAP_THRESHOLD = 32 * 1024 * 1024  # glibc refuses more


def as_carrier(array: np.ndarray, dtype: str) -> tuple[np.ndarray, bool]:
    """The array ready to be shared, and whether it holds bits of `dtype` that must be
    reinterpreted.

    uint16 is returned as int16, which both libraries accept.
    """
    # numpy takes microseconds to format a dtype's name, so it is only read where it matters.
    carries = dtype in BIT_CARRIERS and BIT_CARRIERS[dtype] == array.dtype.name
    if not (array.flags.writeable and array.flags.c_contiguous):
        array = array.copy(order="C")
    if carries and array.dtype == np.uint16:
        array = array.view(np.int16)
    return array, carries


def tune_malloc() -> None:
    """Let glibc keep and reuse large blocks instead of mapping new, zeroed pages for each."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # another C library; only speed is lost
    mallopt(ctypes.c_int(_M_MMAP_THRESHOLD), ctypes.c_int(_MAX_MMAP_THRESHOLD))
    mallopt(ctypes.c_int(_M_TRIM_THRESHOLD), ctypes.c_int(2**31 - 1))


@contextmanager
def hidden_module(name: str) -> Iterator[None]:
    """A context in which importing that module fails; an earlier import stays valid."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def kept_variable(name: str) -> Iterator[None]:
    """A context that restores the environment variable at its end."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def kept_logging() -> Iterator[None]:
    """A context that restores the root logger at its end."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def restore_signals() -> None:
    """Give signals back to Python, which does not see that a library has taken them. Does nothing
    in a thread that is not the main one, where Python changes no signals."""
    if faulthandler.is_enabled():
        faulthandler.disable()
        faulthandler.enable()
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def choose_blas_code() -> None:
    """Tell an old MKL which instructions this processor has, unless the operator already did.

    The MKL in paddle's wheels checks the processor's manufacturer instead of its features and uses
    its slowest code for others: matrix products took 2.7 times as long. It reads the variable once,
    when the library is loaded; newer MKLs ignore it.
    """
    if _MKL_CODE_VARIABLE in os.environ:
        return
    features = processor_features()
    if features >= {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}:
        os.environ[_MKL_CODE_VARIABLE] = "7"
    elif features >= {"avx2", "fma"}:
        os.environ[_MKL_CODE_VARIABLE] = "5"


def processor_features() -> set[str]:
    """The `flags` that Linux lists for the first processor; empty where it lists none."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return set()
    line = next((x for x in info.splitlines() if x.startswith("flags")), "")
    return set(line.split())
