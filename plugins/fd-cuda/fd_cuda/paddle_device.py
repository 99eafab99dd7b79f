"""One GPU on PaddlePaddle's GPU build: the reference operations run on the GPU.

Graphs, collectives and Triton kernels need torch. The parts of this file that need no GPU are
tested on the CPU build.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from fastdeploy_core.contracts.device import (
    CapturedGraph,
    Communicator,
    DeviceEvent,
    DeviceLimits,
    DeviceOptions,
    MemoryInfo,
)
from fastdeploy_core.errors import CapabilityError, ConfigError
from fastdeploy_core.tensor import load

from .device import CudaDevice, wait
from .probe import ask_driver, why_not_paddle

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


class PaddleCudaDevice(CudaDevice):
    """See DeviceBackend."""

    def __init__(self, options: DeviceOptions) -> None:
        reason = ask_driver().error or why_not_paddle()
        if reason:
            raise ConfigError(
                f"device 'cuda' cannot be used: {reason}; run: fastdeploy plugins doctor"
            )
        self._open(options, f"gpu:{options.index}")

    def _open(self, options: DeviceOptions, place: str) -> None:
        import paddle

        self._paddle = paddle
        self.xp = load("paddle")
        self.index, self.device = options.index, place
        paddle.device.set_device(place)
        paddle.seed(options.seed)
        if options.num_threads:
            self.xp.set_num_threads(options.num_threads)
        self.limits = DeviceLimits(dtypes=("float32", "float16", "bfloat16"), asynchronous=True)

    def memory(self) -> MemoryInfo:
        """The driver's figures; they include other processes on the GPU."""
        free, total = self._paddle.cuda.mem_get_info(self.index)
        return MemoryInfo(total_bytes=int(total), free_bytes=int(free))

    def to_device(self, array: np.ndarray) -> Tensor:
        """A copy on the GPU."""
        return self.xp.to_device(self.xp.from_numpy(array), self.device)

    def to_host(self, x: Tensor) -> np.ndarray:
        """The values, once they have arrived; other threads run meanwhile."""
        wait(self.record_event())
        return self.xp.to_numpy(x)

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """Ordinary memory: copies are not asynchronous here."""
        return np.zeros(num_bytes, dtype=np.uint8)

    def upload(self, source: np.ndarray, target: Tensor) -> None:
        """Copied now."""
        target.copy_(self.xp.from_numpy(source), True)

    def download(self, source: Tensor, target: np.ndarray) -> None:
        """Copied now."""
        target[:] = self.xp.to_numpy(source).reshape(-1).view(np.uint8)

    def record_event(self) -> DeviceEvent:
        """On the current stream."""
        event = self._paddle.device.Event()
        event.record()
        recorded: DeviceEvent = event
        return recorded

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        """Refused: one GPU only."""
        raise CapabilityError(
            "device 'cuda' on paddle runs on one GPU (limits.max_tensor_parallel_size is 1); "
            "use --tensor-library torch for several"
        )

    def capture(
        self, run: Callable[[], None], beside: CapturedGraph | None = None
    ) -> CapturedGraph:
        """Refused."""
        raise CapabilityError(
            "device 'cuda' on paddle captures no graphs (limits.graph_capture is False)"
        )

    def close(self) -> None:
        """Give cached memory back to the driver."""
        self._paddle.device.cuda.empty_cache()
