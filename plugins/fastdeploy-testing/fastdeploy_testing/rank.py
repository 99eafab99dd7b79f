"""One rank of a group, started by the conformance kit: exchanges experts' tokens, prints verdicts.

    python -m fastdeploy_testing.rank DEVICE TENSOR_LIBRARY RANK SIZE FOLDER [COMMUNICATOR ...]

The last line printed is a JSON object {communicator: passed}. Without a communicator the device's
own collectives are tested, as `fastdeploy plugins doctor` does.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fastdeploy_core.cli.device_ranks import collectives, join
from fastdeploy_core.contracts.moe import ExpertGroup, ExpertPlan
from fastdeploy_core.plugins.drivers import lookup


def main() -> int:
    """Join, compare, print."""
    communicators = sys.argv[6:]

    def check(device: Any, group: Any) -> dict[str, Any]:
        return {name: experts(device, group, name) for name in communicators}

    return join(sys.argv[1:6], check if communicators else collectives)


def experts(device: Any, group: Any, name: str) -> bool:
    """Dispatch and combine between ranks with uneven token counts equal the result of a single
    rank."""
    rank, world_size = group.rank, group.world_size
    mapping = (0, 1, 2, 3, 2, 0, 1, 3)[: 4 * world_size]
    communicator = lookup("expert_communicator", name)(ExpertGroup(device, group, mapping))
    num_local = len(mapping) // world_size
    for layout in ("contiguous", "masked"):
        plan = ExpertPlan(8, 16, 2, len(mapping), layout, "float32")
        prepared = communicator.plan(plan)
        for step, count in enumerate((5 + rank, rank, 8, 0)):
            rng = np.random.default_rng([step, rank])
            x = rng.standard_normal((count, 16)).astype("float32")
            ids = np.argsort(rng.random((count, 4)), -1)[:, :2]
            ids = np.where(rng.random(ids.shape) < 0.2, -1, ids)
            weights = rng.random((count, 2)).astype("float32")
            sent = communicator.dispatch(
                device.to_device(x), device.to_device(ids), device.to_device(weights), prepared
            )
            y = expert_outputs(device, sent, layout, mapping[rank * num_local :][:num_local])
            got = np.array(device.to_host(communicator.combine(y, sent.handle)))
            if not np.allclose(got, expected_experts(x, ids, weights), rtol=1e-4, atol=1e-5):
                return False
    communicator.close()
    return True


def expert_outputs(device: Any, sent: Any, layout: str, logical: tuple[int, ...]) -> Any:
    """Each local expert e multiplies its rows by (its logical id + 1)."""
    offsets = np.array(device.to_host(sent.offsets))
    y = np.array(device.to_host(sent.x.float()))
    for index, expert in enumerate(logical):
        if layout == "contiguous":
            y[offsets[index] : offsets[index + 1]] *= expert + 1
        else:
            y[index, : offsets[index]] *= expert + 1
    return device.to_device(y)


def expected_experts(x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The same without any exchange."""
    factors = np.where(ids >= 0, (ids + 1) * weights, 0.0).sum(axis=-1, keepdims=True)
    return x * factors


if __name__ == "__main__":
    sys.exit(main())
