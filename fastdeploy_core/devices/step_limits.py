"""What a device's limits mean for the batch scheduler."""

from __future__ import annotations

from typing import Any

from fastdeploy_core.contracts.device import DeviceLimits


def step_limits(limits: DeviceLimits) -> dict[str, Any]:
    """What the batch scheduler must respect of the device, as fields of WorkerInfo."""
    buckets, most = limits.step_buckets, limits.max_prefills_per_step
    if buckets is None:
        return {"mixed_batches": limits.mixed_batches, "max_prefills_per_step": most}
    rows = max(buckets.prompt_rows)
    return {
        "mixed_batches": False,
        "max_prefills_per_step": min(rows, most or rows),
        "max_step_tokens": max(buckets.prompt_tokens),
        "max_step_rows": max(buckets.decode_rows),
    }
