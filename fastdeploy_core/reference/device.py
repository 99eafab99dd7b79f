"""The device `cpu`: this machine's processor, through an installed tensor library."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_core.contracts.device import CapturedGraph, DeviceLimits, DeviceOptions
from fastdeploy_core.devices.host_device import MAX_TENSOR_PARALLEL, HostDevice
from fastdeploy_core.errors import CapabilityError


class CpuDevice(HostDevice):
    """Work runs when it is called, so events are always complete and nothing is ever in flight."""

    name = "cpu"

    def __init__(self, options: DeviceOptions) -> None:
        super().__init__(options)
        self.limits = DeviceLimits(
            dtypes=self.xp.cpu_matmul_dtypes,
            preferred_dtype="float32",  # small products in bfloat16 take several times as long
            max_tensor_parallel_size=MAX_TENSOR_PARALLEL,
            shares_host_memory=True,
        )
        self.xp.set_num_threads(self.num_threads)

    def capture(
        self, run: Callable[[], None], beside: CapturedGraph | None = None
    ) -> CapturedGraph:
        """Refused: a processor has no graphs to capture."""
        raise CapabilityError(
            "device 'cpu' captures no graphs (limits.graph_capture is False); run steps directly"
        )
