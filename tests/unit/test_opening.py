"""Which device, and how many threads, each process of a server opens."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_core.config import DeviceConfig, ParallelConfig
from fastdeploy_core.contracts.device import DeviceLimits, DeviceOptions
from fastdeploy_core.plugins.opening import open_device
from tests.null_engine import make_config


class Plugins:
    """One device driver, which keeps what it is asked for."""

    tensor_library = "torch"

    def load(self, kind: str) -> Any:
        assert kind == "device"
        limits = DeviceLimits(dtypes=("float32",), max_tensor_parallel_size=2)
        return lambda options: SimpleNamespace(name="some", limits=limits, options=options)


def options_of_all(engines: int, ranks: int, num_threads: int = 0) -> list[DeviceOptions]:
    parallel = ParallelConfig(tensor_parallel_size=ranks, data_parallel_size=engines)
    config = replace(make_config(), parallel=parallel, device=DeviceConfig(num_threads=num_threads))
    plugins: Any = Plugins()
    opened: list[Any] = [
        open_device(
            replace(config, parallel=replace(parallel, data_parallel_rank=engine)),
            plugins,
            rank,
            ranks,
        )
        for engine in range(engines)
        for rank in range(ranks)
    ]
    return [device.options for device in opened]


@pytest.mark.parametrize(("engines", "ranks"), [(1, 1), (1, 2), (3, 1), (2, 2)])
def test_engines_take_devices_in_their_order(engines: int, ranks: int) -> None:
    asked = options_of_all(engines, ranks)
    assert [options.index for options in asked] == list(range(engines * ranks))
    assert {options.num_ranks for options in asked} == {engines * ranks}


def test_all_processes_together_have_as_many_threads_as_there_are_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [options.num_threads for options in options_of_all(2, 2)] == [2] * 4
    assert [options.num_threads for options in options_of_all(4, 1)] == [2] * 4
    assert [options.num_threads for options in options_of_all(9, 1)] == [1] * 9
    assert [options.num_threads for options in options_of_all(1, 1)] == [0]  # the driver's choice


def test_a_number_of_threads_counts_for_each_process() -> None:
    assert [options.num_threads for options in options_of_all(2, 1, num_threads=3)] == [3, 3]
