"""The device on PaddlePaddle, as far as it goes without a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.errors import CapabilityError, ConfigError
from fastdeploy_core.tensor import load

from fd_cuda.device import CudaDevice
from fd_cuda.paddle_device import PaddleCudaDevice

pytestmark = pytest.mark.skipif(find_spec("paddle") is None, reason="needs PaddlePaddle")


@pytest.fixture
def device() -> Any:
    """On the processor: every call that paddle's CPU build has too."""
    load("paddle")
    opened = object.__new__(PaddleCudaDevice)
    opened._open(DeviceOptions(tensor_library="paddle", num_threads=1), "cpu")
    return opened


def test_without_a_gpu_it_says_why() -> None:
    with pytest.raises(ConfigError, match=r"device 'cuda' cannot be used.*plugins doctor"):
        CudaDevice(DeviceOptions(tensor_library="paddle"))


def test_copies(device: Any) -> None:
    array = np.arange(6, dtype="float32").reshape(2, 3)
    x = device.to_device(array)
    assert device.xp.dtype_name(x) == "float32" and list(x.shape) == [2, 3]
    source, target = device.host_buffer(24), device.host_buffer(24)
    source[:] = np.arange(24)
    there = device.xp.zeros([24], dtype=device.xp.uint8, device=device.device)
    device.upload(source, there)
    device.download(there, target)
    assert np.array_equal(source, target)
    device.download(x, target)
    assert np.array_equal(target.view("float32").reshape(2, 3), array)


def test_what_it_lacks_is_declared_and_refused(device: Any) -> None:
    assert not device.limits.graph_capture and device.limits.max_tensor_parallel_size == 1
    with pytest.raises(CapabilityError, match="graph_capture"):
        device.capture(lambda: None)
    with pytest.raises(CapabilityError, match="tensor-library torch"):
        device.communicator(0, 2, "/nowhere")


def test_paddles_errors_are_recognised(device: Any) -> None:
    full = RuntimeError(
        "ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 4 GB"
    )
    assert device.is_oom(full) and not device.is_lost(full)
    broken = OSError("(External) CUDA error(700), an illegal memory access was encountered.")
    assert device.is_lost(broken) and not device.is_oom(broken)
