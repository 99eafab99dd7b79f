"""Collectives as far as one GPU can show them: NCCL's calls in a group of one, and the kernel for
small sums between two processes. Several GPUs are the conformance kit's and
benchmarks/several_gpus.py's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.errors import WorkerError

from fastdeploy_testing.drivers import lookup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Single(int):
    """A group's size of one that does not take the short cut for groups of one."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False


@pytest.fixture
def group() -> Any:
    from fd_cuda.communicator import _CALL_LIMIT, CudaCommunicator

    device = lookup("device", "cuda")(DeviceOptions(tensor_library="torch"))
    own = CudaCommunicator(device, 0, 1, "")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _CALL_LIMIT
    own._nccl = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
    own.world_size = Single(1)
    yield own
    own.close()


def calls(group: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [
        group.all_reduce(x.clone()),
        group.all_gather(x, 0),
        group.all_gather(x, -1),
        group.broadcast(x),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_call_of_nccl(group: Any, dtype: torch.dtype) -> None:
    x = torch.arange(24, device="cuda").view(6, 4).to(dtype)
    group.barrier()
    for result in calls(group, x):
        assert torch.equal(result, x)


def test_calls_can_be_captured(group: Any) -> None:
    x = torch.arange(24, device="cuda").view(6, 4).float()
    calls(group, x)
    found: list[torch.Tensor] = []
    graph = group._device.capture(lambda: found.extend(calls(group, x)))
    x.mul_(3)
    graph.replay()
    torch.cuda.synchronize()
    for result in found:
        assert torch.equal(result, x)


def test_calls_after_the_end_say_so(group: Any) -> None:
    group.close()
    with pytest.raises(WorkerError, match="the communicator is closed"):
        group.all_reduce(torch.ones(3, device="cuda"))


CHILD = """
import sys
import torch, torch.distributed as dist
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_testing.drivers import lookup
from fd_cuda.one_shot import OneShot
rank, folder = int(sys.argv[1]), sys.argv[2]
device = lookup("device", "cuda")(DeviceOptions(tensor_library="torch"))
store = dist.FileStore(folder + "/store", 2)
own = OneShot(store, rank, 2)
def part(which, size, dtype):
    generator = torch.Generator().manual_seed(which * 100 + size)
    return torch.randn(size, generator=generator).to(dtype).cuda()
store.set(f"here/{rank}", "1"); store.wait([f"here/{1 - rank}"])
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for size in (1, 7, 2048, 2049, 100_003):
        both = [part(which, size, dtype) for which in (0, 1)]
        found = own.all_reduce(both[rank])
        assert torch.equal(found, (both[0].float() + both[1].float()).to(dtype)), (dtype, size)
x, out = part(rank, 999, torch.float32), []
graph = device.capture(lambda: out.extend(own.all_reduce(x) for _ in range(3)))
for _ in range(5):
    graph.replay()
torch.cuda.synchronize()
expected = part(0, 999, torch.float32) + part(1, 999, torch.float32)
assert all(torch.equal(y, expected) for y in out)
store.set(f"done/{rank}", "1"); store.wait([f"done/{1 - rank}"])
own.close()
print("equal", flush=True)
"""


def test_sums_of_two_processes_by_one_kernel(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [text.splitlines()[-1:] for text in said] == [["equal"], ["equal"]], said
