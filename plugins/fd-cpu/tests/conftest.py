"""The native module alone: numpy arrays in, numpy arrays out."""

from __future__ import annotations

import numpy as np
import pytest
from fd_cpu import _native

F32, BF16 = 0, 1


def address(array):
    return array.ctypes.data


def to_bf16(values):
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(values):
    return (values.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(
    params=[
        (isa, n)
        for isa in (*_native.available_isas(), "emulated", "emulated_vnni")
        for n in (1, 2, 3)
    ],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def runtime(request):
    isa, num_threads = request.param
    try:
        return _native.Runtime(num_threads, [], isa)
    except ValueError:
        if not isa.startswith("emulated"):
            raise
        pytest.skip("built without FD_CPU_EMULATED (README.md), or no AVX2 here")
