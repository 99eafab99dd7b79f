"""One rank of a group of devices: runs collectives, or exchanges experts' tokens; prints verdicts.

    python -m fastdeploy_testing.rank DEVICE TENSOR_LIBRARY RANK SIZE FOLDER [COMMUNICATOR ...]

The last line printed is a JSON object {communicator: passed}. Without a communicator the device's
own collectives are tested: {check: passed}, and a digest of values that are the same on every rank,
so equal lines mean that the ranks agree bit by bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.moe import ExpertGroup, ExpertPlan
from fastdeploy_core.plugins.drivers import lookup

Check = Callable[[Any, Any], dict[str, Any]]  # (device, communicator) to verdicts by name


def run_ranks(name: str, library: str, world_size: int) -> list[dict[str, bool]]:
    """The collectives of a device in real processes; the verdicts of every rank.

    Raises RuntimeError with what the failed ranks wrote when one of them fails.
    """
    with tempfile.TemporaryDirectory(prefix="fastdeploy-check-") as folder:
        address = Path(folder) / "group"
        address.mkdir(mode=0o700)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        processes = [
            subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, "-P", "-m", "fastdeploy_testing.rank",
                 name, library, str(rank), str(world_size), str(address)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=300) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    # Of all of them: the first may only have waited for one that failed.
    failed = [
        errors.strip()[-2000:]
        for p, (_, errors) in zip(processes, said, strict=True)
        if p.returncode
    ]
    if failed:
        raise RuntimeError("\n\n".join(failed))
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in said]


def join(arguments: Sequence[str], check: Check) -> int:
    """Join the group that `arguments` describe (see above), check, print the verdicts."""
    name, library, rank, world_size, address = arguments
    options = DeviceOptions(index=int(rank), tensor_library=library, num_threads=1)
    device = lookup("device", name)(options)
    group = device.communicator(int(rank), int(world_size), address)
    with device.xp.no_grad():
        verdicts = check(device, group)
    group.barrier()
    group.close()
    device.close()
    sys.stdout.write(json.dumps(verdicts, sort_keys=True) + "\n")
    return 0


def collectives(device: Any, group: Any) -> dict[str, Any]:
    """Every collective and the barrier, over shapes and dtypes, with a digest of results."""
    rank, world_size = group.rank, group.world_size
    digest = hashlib.sha256()
    verdicts: dict[str, Any] = {}

    def mine(which: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        values = np.random.default_rng(which).standard_normal(shape) * 4
        return np.round(values).astype("float32") if dtype != "int64" else np.round(values)

    def check(name: str, got: Any, expected: np.ndarray) -> None:
        got = np.array(device.to_host(got.float()))
        digest.update(got.tobytes())
        verdicts[name] = verdicts.get(name, True) and (
            got.shape == expected.shape and np.array_equal(got, expected)
        )

    for dtype in [d for d in device.limits.dtypes if d != "float64"]:
        for shape in ((1,), (3, 5), (0, 4), (33, 64)):
            everyone = [mine(r, shape, dtype) for r in range(world_size)]
            kind = device.xp.dtype(dtype)

            def tensor(array: np.ndarray, kind: Any = kind) -> Any:
                return device.to_device(np.ascontiguousarray(array)).to(kind)

            x = tensor(everyone[rank])
            check("all_reduce", group.all_reduce(x), np.sum(everyone, axis=0))
            for dim in range(-1, len(shape)):
                x = tensor(everyone[rank])
                check("all_gather", group.all_gather(x, dim=dim), np.concatenate(everyone, dim))
            for source in range(world_size):
                x = tensor(everyone[rank])
                check("broadcast", group.broadcast(x, source=source), everyone[source])
    ids = device.to_device(np.arange(5, dtype="int64") + rank)
    everyone = [np.arange(5) + r for r in range(world_size)]
    check("all_gather of int64", group.all_gather(ids, dim=0), np.concatenate(everyone))
    check("broadcast of int64", group.broadcast(ids, source=0), everyone[0])
    # Values whose sum depends on the order of adding: all ranks must still get the same bits.
    rough = np.random.default_rng(rank).standard_normal(1000).astype("float32") * 10.0**rank
    digest.update(np.array(device.to_host(group.all_reduce(device.to_device(rough)))).tobytes())
    for _ in range(20):
        group.barrier()
    verdicts["digest"] = digest.hexdigest()
    return verdicts


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
