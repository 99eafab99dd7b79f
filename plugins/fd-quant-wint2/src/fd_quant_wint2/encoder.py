"""Finding the states of a strand: Viterbi search, in C++ on processors, in tensor code on any
device.

Both close the ring the same way: a free search over half the ring around the seam finds the edge
(the bits that two neighbouring states share) to close in, then the whole ring is searched with that
edge fixed. States of the search are bit-reversed, newest symbol lowest, so that a step is a plain
reshape.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .code import STATE_BITS, STRAND, SYMBOLS, scaled_codebook

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

logger = logging.getLogger(__name__)

Progress = Callable[[int], None]
_STATES: Final = 1 << STATE_BITS
_NATIVE_BATCH: Final = 64  # strands between progress reports
_TENSOR_BATCH: Final = 64
_COMPILE_TIMEOUT_S: Final = 120


def encode(
    strands: np.ndarray,
    bits: int,
    *,
    xp: Any = None,
    device: str = "",
    progress: Progress | None = None,
) -> np.ndarray:
    """[n, 512] float32 of unit variance to [n, 256] uint16 states; progress(weights done).

    On an accelerator the search runs there (`xp` and `device` name it); on a processor in compiled
    code, or in numpy's and the tensor library's own where there is no compiler.
    """
    strands = np.ascontiguousarray(strands, np.float32)
    native = _native() if device in ("", "cpu") else None
    batch = _NATIVE_BATCH if native is not None else _TENSOR_BATCH
    parts = []
    for start in range(0, len(strands), batch):
        part = strands[start : start + batch]
        if native is not None:
            parts.append(_encode_native(native, part, bits))
        else:
            parts.append(_encode_tensor(xp, device or "cpu", part, bits))
        if progress is not None:
            progress(part.size)
    states = np.concatenate(parts) if parts else np.zeros((0, SYMBOLS), np.uint16)
    return _reversed_bits()[states]


@lru_cache(maxsize=1)
def _reversed_bits() -> np.ndarray:
    """[65536] uint16: each state read backwards."""
    states = np.arange(_STATES, dtype=np.uint32)
    found = np.zeros(_STATES, np.uint32)
    for bit in range(STATE_BITS):
        found |= ((states >> bit) & 1) << (STATE_BITS - 1 - bit)
    return found.astype(np.uint16)


@lru_cache(maxsize=3)
def _search_book(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First and second weight of each reversed state, and half the squared length of the pair."""
    book = scaled_codebook(bits)[_reversed_bits()]
    first, second = (np.ascontiguousarray(book[:, n]) for n in (0, 1))
    return first, second, (first * first + second * second) * np.float32(0.5)


# -- compiled -------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _native() -> ctypes.CDLL | None:
    """The compiled search; None, with one line in the log, where it cannot be built."""
    source = Path(__file__).with_name("viterbi.cpp")
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        logger.warning(
            "no C++ compiler (CXX, c++, g++): 2-bit encoding runs about 100 times slower"
        )
        return None
    try:
        return _bind(ctypes.CDLL(str(_build(compiler, source))))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        logger.warning("2-bit encoding runs about 100 times slower, %s failed: %s", compiler, error)
        return None


def _build(compiler: str, source: Path) -> Path:
    """Compile into the user's cache, once for each source, compiler and processor."""
    cpu = next((x for x in _lines("/proc/cpuinfo") if x.startswith(("flags", "Features"))), "")
    key = hashlib.sha256(b"\0".join((source.read_bytes(), compiler.encode(), cpu.encode())))
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(home) / "fastdeploy" / "fd-quant-wint2"
    target = folder / f"viterbi-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "viterbi.so"
        command = [
            compiler,
            "-O3",
            "-march=native",
            "-shared",
            "-fPIC",
            "-o",
            str(built),
            str(source),
        ]
        subprocess.run(  # noqa: S603 - the operator's compiler on our own source
            command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S
        )
        built.replace(target)  # other processes see a whole file or none
    return target


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _bind(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    library.fd_tet2_encode.restype = ctypes.c_int
    library.fd_tet2_encode.argtypes = [
        ctypes.c_int, pointer, pointer, pointer, pointer, ctypes.c_long, ctypes.c_int, pointer,
    ]  # fmt: skip
    return library


def _encode_native(library: ctypes.CDLL, strands: np.ndarray, bits: int) -> np.ndarray:
    first, second, norm = _search_book(bits)
    strands = np.ascontiguousarray(strands)
    states = np.empty((len(strands), SYMBOLS), np.uint16)
    failed = library.fd_tet2_encode(
        2 * bits, first.ctypes.data, second.ctypes.data, norm.ctypes.data, strands.ctypes.data,
        len(strands), STRAND, states.ctypes.data,
    )  # fmt: skip
    if failed:
        raise ValueError(f"strands of {strands.shape[1]} weights at {bits} bits cannot be encoded")
    return states


# -- tensor code ----------------------------------------------------------------------------------


def _encode_tensor(xp: Any, device: str, strands: np.ndarray, bits: int) -> np.ndarray:
    book = tuple(xp.to_device(xp.from_numpy(a.copy()), device) for a in _search_book(bits))
    pairs = strands.reshape(len(strands), SYMBOLS, 2)
    window, half = SYMBOLS // 2, SYMBOLS // 4
    around = np.take(pairs, (np.arange(window) - half) % SYMBOLS, axis=1)
    seam = _search(xp, device, book, around, bits, None)
    edges = seam[:, half].astype(np.int64) >> (2 * bits)
    return _search(xp, device, book, pairs, bits, edges)


def _search(
    xp: Any, device: str, book: tuple[Tensor, ...], pairs: np.ndarray, bits: int, edges: Any
) -> np.ndarray:
    """Best states [n, steps] uint16 for pairs [n, steps, 2]; from and to an edge where one is
    given."""
    width = 2 * bits
    count, steps = pairs.shape[:2]
    num_edges, branches = _STATES >> width, 1 << width
    first, second, norm = (part.unsqueeze(0) for part in book)
    start = np.zeros((count, num_edges), np.float32)
    if edges is not None:
        start[:] = 1e30
        start[np.arange(count), edges] = 0
    cost = xp.to_device(xp.from_numpy(start), device)
    x = xp.to_device(xp.from_numpy(np.ascontiguousarray(pairs)), device)
    back = []
    for step in range(steps):
        total = xp.repeat_interleave(cost, branches, 1) + norm
        total = total - x[:, step, 0:1] * first - x[:, step, 1:2] * second
        total = -total.view([count, branches, num_edges])
        winner = xp.argmax(total, 1)
        cost = -xp.amax(total, 1)
        back.append(winner.to(xp.uint8))
    winners = xp.to_numpy(xp.stack(back))  # only now: an accelerator shall not wait at every step
    edge = np.asarray(edges) if edges is not None else np.argmin(np.array(xp.to_numpy(cost)), 1)
    rows, states = np.arange(count), np.empty((count, steps), np.uint16)
    for step in range(steps - 1, -1, -1):
        branch = winners[step][rows, edge].astype(np.int64)
        state = branch * num_edges + edge
        states[:, step] = state
        edge = state >> width
    return states
