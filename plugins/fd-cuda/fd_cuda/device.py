"""The device `cuda`: one NVIDIA GPU as one process sees it, on torch or on PaddlePaddle.

`CudaDevice(options)` makes the class for the tensor library asked for: torch_device.py (graphs,
collectives, Triton kernels) or paddle_device.py (the reference operations on the GPU).
"""

from __future__ import annotations

import time
from typing import Final

from fastdeploy_core.contracts.device import DeviceBackend, DeviceEvent, DeviceOptions
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.tensor import available, load

from .failures import is_lost, is_oom

# Decode steps take fractions of a millisecond: spin for this long, then let other threads run.
_SPIN_S: Final = 100e-6
_NAP_S: Final = 30e-6


class CudaDevice(DeviceBackend):
    """What both tensor libraries share."""

    name = "cuda"
    contract = (1, 0)
    worker = ""

    def __new__(cls, options: DeviceOptions) -> CudaDevice:
        """An instance of the class for the tensor library."""
        if cls is not CudaDevice:
            return object.__new__(cls)
        library = load(options.tensor_library or _default_library()).name
        if library == "torch":
            from .torch_device import TorchCudaDevice

            return object.__new__(TorchCudaDevice)
        from .paddle_device import PaddleCudaDevice

        return object.__new__(PaddleCudaDevice)

    def _answers(self) -> bool:
        """Whether the GPU still does what this process tells it. An error that ends that comes back
        with every later call."""
        try:
            wait(self.record_event())
        except Exception:
            return False
        return True

    def is_oom(self, error: BaseException) -> bool:
        """See failures.py."""
        return is_oom(error, self._answers)

    def is_lost(self, error: BaseException) -> bool:
        """See failures.py."""
        return is_lost(error, self._answers)


def wait(event: DeviceEvent) -> None:
    """Poll until the event has happened; other threads run meanwhile."""
    give_up_spinning = time.perf_counter() + _SPIN_S
    while not event.query():
        if time.perf_counter() > give_up_spinning:
            time.sleep(_NAP_S)


def _default_library() -> str:
    found = available()
    if not found:
        raise ConfigError(
            "device 'cuda' needs a tensor library and none is installed; possible: torch, paddle; "
            "install a CUDA build of torch"
        )
    return found[0]
