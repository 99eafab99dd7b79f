"""One rank of a group: runs every collective of a device and prints verdicts.

    python -m fastdeploy_core.cli.device_ranks DEVICE TENSOR_LIBRARY RANK WORLD_SIZE FOLDER

The last line printed is a JSON object {check: passed}; the values compared are the same on every
rank, so equal lines mean that the ranks agree bit by bit. `doctor` and the conformance kit start
it.
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
                [sys.executable, "-P", "-m", "fastdeploy_core.cli.device_ranks",
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


if __name__ == "__main__":
    sys.exit(join(sys.argv[1:], collectives))
