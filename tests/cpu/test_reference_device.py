"""Devices in host memory, by the example of `cpu`: limits, memory, errors."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fastdeploy_core import tensor
from fastdeploy_core.contracts.device import DeviceBackend, DeviceOptions
from fastdeploy_core.devices import host_device as module
from fastdeploy_core.errors import CapabilityError, ConfigError
from fastdeploy_core.reference.device import CpuDevice


@pytest.fixture
def device(tensor_library):
    return CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))


def test_device_keeps_the_contract(device, tensor_library):
    assert isinstance(device, DeviceBackend)
    assert (device.name, device.device, device.worker) == ("cpu", "cpu", "")
    assert device.xp is tensor.load(tensor_library)
    assert device.record_event().query() is True
    device.close()


def test_every_declared_dtype_can_be_multiplied(device):
    xp = device.xp
    for name in device.limits.dtypes:
        x = xp.ones([3, 4], dtype=xp.dtype(name))
        assert xp.linear(x, x).float().tolist() == [[4.0] * 3] * 3


def test_threads_are_as_asked_for(tensor_library):
    xp = tensor.load(tensor_library)
    CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=2))
    assert xp.get_num_threads() == 2
    CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))
    assert xp.get_num_threads() == 1


def test_threads_without_a_number_are_those_of_omp_num_threads(tensor_library, monkeypatch):
    options = DeviceOptions(tensor_library=tensor_library)
    for text, count in (("1", 1), ("1,4", 1), ("99999", os.cpu_count())):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert CpuDevice(options).num_threads == count
    for text in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert CpuDevice(options).num_threads == module.usable_cores()


def test_unknown_library_is_refused():
    with pytest.raises(ConfigError, match="unknown tensor library 'jax'"):
        CpuDevice(DeviceOptions(tensor_library="jax"))


def test_no_library_says_what_to_install(monkeypatch):
    monkeypatch.setattr(module, "available", lambda: [])
    with pytest.raises(ConfigError, match=r'pip install "fastdeploy-core\[paddle\]"'):
        CpuDevice(DeviceOptions())


def test_memory_is_plausible(device):
    info = device.memory()
    assert 64 * 2**20 < info.free_bytes <= info.total_bytes


def write(folder, name, text):
    (folder / name).write_text(text)


def test_memory_of_a_container_is_its_limit(device, monkeypatch, tmp_path):
    gib = 2**30
    write(tmp_path, "memory.max", f"{gib // 2}\n")
    write(tmp_path, "memory.current", f"{gib // 4}\n")
    write(tmp_path, "memory.stat", f"anon 5\ninactive_file {gib // 8}\nactive_file 7\n")
    monkeypatch.setattr(module, "_cgroup_folders", lambda: [tmp_path])
    info = device.memory()
    assert info.total_bytes == gib // 2
    assert info.free_bytes == gib // 2 - gib // 8  # reclaimable file pages are free
    write(tmp_path, "memory.max", "max\n")
    assert device.memory().total_bytes > gib // 2


def test_cores_are_cut_by_a_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_cgroup_folders", lambda: [tmp_path])
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert module.usable_cores() == 16
    for text, cores in (("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1)):
        write(tmp_path, "cpu.max", text + "\n")
        assert module.usable_cores() == cores


def test_running_out_of_memory_is_recognised(device):
    xp = device.xp
    with pytest.raises(Exception, match=r".") as failure:
        xp.zeros([2**46], dtype=xp.float32)
    assert device.is_oom(failure.value), failure.value
    assert device.is_oom(MemoryError())
    with pytest.raises(MemoryError) as failure:
        np.zeros(2**50)
    assert device.is_oom(failure.value)


def test_other_errors_are_not_memory(device):
    xp = device.xp
    with pytest.raises(Exception, match=r".") as failure:
        xp.matmul(xp.ones([2, 3]), xp.ones([2, 3]))
    assert not device.is_oom(failure.value)
    assert not device.is_lost(failure.value)
    assert not device.is_oom(ValueError("boom"))


def test_graphs_are_refused(device):
    assert device.limits.graph_capture is False
    with pytest.raises(CapabilityError, match="graph_capture"):
        device.capture(lambda: None)


def test_arrays_go_there_and_back(device):
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    x = device.to_device(array)
    assert isinstance(x, device.xp.tensor_type)
    assert np.array_equal(device.to_host(x), array)
