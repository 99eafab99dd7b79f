"""What the batch scheduler must respect; engine/settings.py says where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy_core.config import BatchConfig, SpeculativeConfig
from fastdeploy_core.contracts.device import DeviceLimits
from fastdeploy_core.types.worker import WorkerInfo

NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Fixed for the life of an engine."""

    max_model_len: int
    batch: BatchConfig  # cut to what the device takes in one step
    device: WorkerInfo
    speculative: SpeculativeConfig | None = None
    lookahead_tokens: int = 0  # of the speculative method; see contracts.Requirements
    max_encode_tokens: int = NO_LIMIT  # vectors of pictures in a step, or one picture
    seed: int = 0
    max_adapters: int = 0  # different LoRA adapters in a step

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a row; 0 without speculation."""
        return self.speculative.num_speculative_tokens if self.speculative is not None else 0


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
