"""The simulated device behind torch: what it refuses, what comes late, what it says when it is
gone.

In processes of their own: this suite's is PaddlePaddle's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fd_simdevice.build import SimulationUnavailable
from fd_simdevice.torch_side import install_torch

MEMORY_MB = 64


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("modules")
    try:
        more = install_torch(folder, "torch_acme", "acme", "accl")
    except SimulationUnavailable as error:
        pytest.skip(str(error))
    return os.environ | more | {"OMP_NUM_THREADS": "1", "SIM_MEM_MB": str(MEMORY_MB)}


def run(environment: dict[str, str], program: str) -> subprocess.CompletedProcess[str]:
    text = "import torch, torch_acme\n" + program
    return subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=300,
        check=False, cwd=Path(__file__).parent,
    )  # fmt: skip


def test_memory_has_a_limit_and_comes_back(environment: dict[str, str]) -> None:
    done = run(
        environment,
        """
free, total = torch.acme.mem_get_info(0)
assert free == total == 64 << 20
x = torch.ones(10 << 20, dtype=torch.float32, device="acme:0")
assert torch.acme.mem_get_info(0)[0] == free - x.nbytes
assert torch.acme.mem_get_info(1)[0] == total
try:
    x + x
except torch.OutOfMemoryError as error:
    assert "41943040 bytes wanted" in str(error)
else:
    raise AssertionError("64 MiB held 80")
x.mul_(2)
assert x[-2:].tolist() == [2, 2]
del x
assert torch.acme.mem_get_info(0)[0] == free
""",
    )
    assert done.returncode == 0, done.stderr


def test_copies_to_the_host_wait_for_their_event(environment: dict[str, str]) -> None:
    done = run(
        environment,
        """
x, host = torch.ones(4, device="acme"), torch.zeros(4)
host.copy_(x, non_blocking=True)
x.zero_()
event = torch.Event("acme:0")
event.record()
assert host.tolist() == [0] * 4 and not event.query()
while not event.query():
    pass
assert host.tolist() == [1] * 4 and x.cpu().tolist() == [0] * 4
""",
    )
    assert done.returncode == 0, done.stderr


def test_views_see_the_same_memory(environment: dict[str, str]) -> None:
    done = run(
        environment,
        """
x = torch.arange(12.0, device="acme")
x.view(3, 4).t()[1:, :2].fill_(-1)
assert x.tolist() == [0, -1, -1, -1, 4, -1, -1, -1, 8, 9, 10, 11]
torch.view_as_complex(x.view(6, 2)).mul_(2)  # a view that only the processor knows how to make
assert x.tolist()[8:] == [16, 18, 20, 22]
out = torch.empty(0, device="acme")
torch.mul(x, x, out=out)
assert out.device.type == "acme" and out.tolist()[8:] == [256, 324, 400, 484]
""",
    )
    assert done.returncode == 0, done.stderr


def test_the_host_cannot_read_device_memory(environment: dict[str, str]) -> None:
    done = run(
        environment,
        """
import ctypes
x = torch.ones(4, device="acme")
print(x.tolist(), flush=True)
ctypes.string_at(x.data_ptr(), 4)
""",
    )
    assert "[1.0, 1.0, 1.0, 1.0]" in done.stdout, done.stderr
    assert done.returncode in (-11, 139)


def test_the_contracts_base_tells_a_lost_device_from_a_mistake(environment: dict[str, str]) -> None:
    done = run(
        environment,
        """
from fastdeploy_core.contracts.device import DeviceLimits, DeviceOptions
from fd_accelerator.torch_device import TorchAcceleratorDevice, TorchFacts
from fastdeploy_core.errors import CapabilityError, ConfigError, PluginLoadError

class Acme(TorchAcceleratorDevice):
    name = "acme"
    facts = TorchFacts(
        name="acme",
        type_name="acme",
        limits=DeviceLimits(graph_capture=True),
        collectives="accl",
        module="torch_acme",
    )

def refused(kind, options):
    try:
        Acme(options)
    except kind as error:
        return str(error)
    raise AssertionError(options)

assert "no chip 2: 2 visible" in refused(ConfigError, DeviceOptions(index=2))
assert "asked for 'paddle'" in refused(PluginLoadError, DeviceOptions(tensor_library="paddle"))
second, device = Acme(DeviceOptions(index=1)), Acme(DeviceOptions())
assert (second.device, device.device) == ("acme:1", "acme:0")
x = second.to_device(device.host_buffer(8))
assert str(x.device) == "acme:1" and second.memory().free_bytes < device.memory().free_bytes
assert not device.limits.graph_capture and not device.is_lost(RuntimeError("shapes"))
try:
    device.communicator(0, 2, "")
except CapabilityError as error:
    assert "at most 1 ranks" in str(error)
torch.ops.fd_simdevice.lose(True)
try:
    device.to_host(x + x)
except RuntimeError as error:
    assert device.is_lost(error) and not device.is_oom(error)
    torch.ops.fd_simdevice.lose(False)
    assert not device.is_lost(error)
else:
    raise AssertionError("a lost device answered")
""",
    )
    assert done.returncode == 0, done.stderr
