"""What a device's library raises, in this project's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.errors import ResourceError, WorkerError

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend


def raise_if_device_failed(
    device: DeviceBackend, rank: int, step_id: int, error: Exception
) -> None:
    """Nothing happens if the error has another reason."""
    if device.is_oom(error):
        raise ResourceError(
            f"device memory ran out in step {step_id}; lower --gpu-memory-utilization, "
            "--max-num-batched-tokens or --max-num-seqs"
        ) from error
    if device.is_lost(error):
        what = f"{type(error).__name__}: {error}"
        raise WorkerError(f"the device of rank {rank} is lost in step {step_id}: {what}") from error
