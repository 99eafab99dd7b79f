"""A device backend: tensors there and back, events, memory, collectives, graphs, clear errors."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.device import (
    AttendingDevice,
    DeviceLimits,
    DeviceOptions,
    PackingDevice,
    RepeatingDevice,
)
from fastdeploy_core.errors import CapabilityError
from fastdeploy_testing.rank import run_ranks

from .base import OnDevice, assert_memory_returns, values, wait_until


class DeviceConformance(OnDevice):
    """Everything about a device that needs no model."""

    kind = "device"

    @pytest.fixture(scope="class")
    @classmethod
    def device_library(cls, device: Any) -> str:
        """Name of the tensor library the device runs on."""
        return str(device.xp.name)

    def test_limits_agree_with_themselves(self, device: Any) -> None:
        limits = device.limits
        assert isinstance(limits, DeviceLimits)
        assert limits.dtypes, "no dtype is declared"
        for name in limits.dtypes:
            assert device.xp.dtype_name(device.xp.dtype(name)) == name
        if limits.block_sizes is not None:
            assert limits.default_block_size in limits.block_sizes
        assert limits.default_block_size >= 1 and limits.max_tensor_parallel_size >= 1
        if (buckets := limits.step_buckets) is not None:
            for sizes in dataclasses.astuple(buckets):
                assert sizes and sizes == tuple(sorted(set(sizes))) and sizes[0] >= 1, sizes
            assert not limits.mixed_batches, "a padded step is of prompts or of decodes"
        assert limits.decodes_per_step >= 1
        if limits.decodes_per_step > 1:
            assert limits.graph_capture, "steps that run without the host are captured ones"

    def test_worker_is_declared_by_the_class(self, driver: Any) -> None:
        # The engine reads it before it makes an instance.
        assert isinstance(driver.worker, str) and (not driver.worker or ":" in driver.worker)

    def test_memory_is_what_a_machine_can_have(self, device: Any) -> None:
        info = device.memory()
        assert 0 <= info.free_bytes <= info.total_bytes
        assert info.total_bytes > 0

    @pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5), (2, 0, 4), (2, 3, 4)], ids=str)
    @pytest.mark.parametrize("name", ["float32", "int64", "int32", "uint8", "bool"])
    def test_arrays_come_back_as_they_went(
        self, device: Any, shape: tuple[int, ...], name: str
    ) -> None:
        array = (np.arange(int(np.prod(shape))) % 2 if name == "bool" else
                 np.arange(int(np.prod(shape)))).astype(name).reshape(shape)  # fmt: skip
        x = device.to_device(array.copy())
        assert device.xp.dtype_name(x.dtype) == name
        back = device.to_host(x)
        assert back.dtype == array.dtype and back.shape == array.shape
        assert np.array_equal(back, array)

    def test_computed_tensors_come_back(self, device: Any, dtype: str) -> None:
        x = self.to_device(device, np.arange(12, dtype="float32").reshape(3, 4), dtype)
        y = (x + x).transpose(0, 1)  # not contiguous
        assert np.array_equal(device.to_host(y.float()), np.arange(12).reshape(3, 4).T * 2)

    def test_tensors_lie_on_the_device(self, device: Any) -> None:
        xp = device.xp
        x = device.to_device(np.ones(3, "float32"))
        made = xp.ones([3], dtype=xp.float32, device=device.device)
        assert isinstance(x, xp.tensor_type)
        assert str(x.place if xp.name == "paddle" else x.device) == str(
            made.place if xp.name == "paddle" else made.device
        )
        assert device.to_host((x + made).float()).tolist() == [2, 2, 2]

    def test_event_is_done_after_the_work_before_it(self, device: Any) -> None:
        x = self.to_device(device, np.ones((64, 64), "float32"))
        for _ in range(8):
            x = device.xp.matmul(x, x) * 0.01
        event = device.record_event()
        assert wait_until(event.query, 60), "the event was never reached"
        assert event.query(), "an event that was done is not done any more"

    @pytest.mark.parametrize("name", ["float32", "int64", "int32"])
    def test_queued_copies_arrive_by_the_next_event(self, device: Any, name: str) -> None:
        memory = device.host_buffer(4096)
        assert memory.dtype == np.uint8 and memory.shape == (4096,) and not memory.any()
        xp = device.xp
        target = xp.zeros([512], dtype=xp.uint8, device=device.device)
        values = np.arange(512 // np.dtype(name).itemsize).astype(name)
        memory[512:1024] = values.view(np.uint8)
        device.upload(memory[512:1024], target)
        x = target.view(xp.dtype(name))
        device.download(x + x, memory[1024:1536])
        x.zero_()  # queued after the copy, which must not see it
        event = device.record_event()
        assert wait_until(event.query, 60), "the copies never happened"
        back = memory[1024:1536].view(name)
        assert np.array_equal(back, values + values)
        assert not memory[1536:].any(), "a copy wrote beyond its part"

    def test_ordinary_errors_are_neither_oom_nor_lost(self, device: Any) -> None:
        for error in (ValueError("x"), RuntimeError("shape mismatch"), KeyError("k")):
            assert not device.is_oom(error)
            assert not device.is_lost(error)

    def test_too_large_a_tensor_is_recognised_as_oom(self, device: Any) -> None:
        with pytest.raises(Exception) as caught:
            # Four pebibytes: more than any address space here, so that it fails without paging.
            device.to_host(
                device.xp.zeros([2**50], dtype=device.xp.float32, device=device.device)[:1]
            )
        assert device.is_oom(caught.value), f"not recognised: {caught.value!r:.300}"
        x = self.to_device(device, np.ones(4, "float32"))
        assert device.to_host(x + x).tolist() == [2, 2, 2, 2], "the device is unusable after OOM"

    @pytest.mark.capability("graph_capture")
    def test_graph_equals_eager(self, device: Any) -> None:
        if not device.limits.graph_capture:
            with pytest.raises(CapabilityError):
                device.capture(lambda: None)
            pytest.skip("limits.graph_capture is False")
        xp = device.xp
        x = self.to_device(device, np.zeros((4, 8), "float32"))
        out = xp.zeros([4, 8], dtype=xp.float32, device=device.device)

        def run() -> None:
            out.copy_(xp.silu(x) + x)

        graph = device.capture(run)
        for seed in range(3):
            values = np.random.default_rng(seed).standard_normal((4, 8)).astype("float32")
            x.copy_(device.to_device(values.copy()))
            graph.replay()
            got = np.array(device.to_host(out))
            run()
            assert np.array_equal(got, device.to_host(out)), "a replay differs from an eager run"

    @pytest.mark.capability("graph_capture")
    def test_a_graph_beside_another_keeps_what_it_made_until_the_next_replay(
        self, device: Any
    ) -> None:
        if not device.limits.graph_capture:
            pytest.skip("limits.graph_capture is False")
        x = self.to_device(device, np.ones((16, 64), "float32"))
        made: dict[int, Any] = {}

        def work(rows: int) -> Any:
            def run() -> None:
                made[rows] = device.xp.silu(x[:rows] + x[:rows]) * rows

            return run

        for rows in (16, 4):
            work(rows)()
        large = device.capture(work(16))
        of_large = made[16]
        small = device.capture(work(4), large)
        of_small = made[4]
        for rows, graph, kept in (
            (4, small, of_small),
            (16, large, of_large),
            (4, small, of_small),
        ):
            x.copy_(self.to_device(device, np.full((16, 64), rows, "float32")))
            graph.replay()
            kept = made[rows] if device.device == "cpu" else kept
            expected = device.xp.silu(x[:rows] + x[:rows]) * rows
            assert np.array_equal(device.to_host(kept + 0), device.to_host(expected))

    @pytest.mark.capability("graph_capture")
    def test_graphs_are_replayed_in_turns(self, device: Any) -> None:
        if not isinstance(device, RepeatingDevice):
            pytest.skip("the device leaves it to the core")
        backend: Any = device
        x = self.to_device(backend, np.ones(8, "float32"))

        def double() -> None:
            x.copy_(x + x)

        def less() -> None:
            x.copy_(x - 1)

        graphs = [backend.capture(run) for run in (double, less)]
        for times in (1, 4):
            x.copy_(self.to_device(backend, np.full(8, 3, "float32")))
            backend.replay_times(graphs, times)
            wanted = 2**times * 2 + 1  # x - 1 is doubled each time
            assert backend.to_host(x).tolist() == [wanted] * 8

    @pytest.mark.parametrize("dim", [16, 80, 128])
    def test_packed_runs_attend_within_themselves(self, device: Any, dim: int) -> None:
        if not isinstance(device, AttendingDevice):
            pytest.skip("the device leaves it to the towers")
        backend: Any = device
        lengths, heads = [1, 64, 7, 130], 2
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        given = [values(seed, sum(lengths), heads, dim) for seed in range(3)]
        for dtype in backend.limits.dtypes:
            tensors = [self.to_device(backend, x, dtype) for x in given]
            found = backend.attend_packed(*tensors, self.to_device(backend, starts), max(lengths))
            if found is None:
                continue
            q, k, v = (self.to_host(backend, x).astype(np.float64) for x in tensors)
            for first, end in itertools.pairwise(starts.tolist()):
                scores = np.einsum("qhd,khd->hqk", q[first:end], k[first:end]) / dim**0.5
                shares = np.exp(scores - scores.max(-1, keepdims=True))
                shares /= shares.sum(-1, keepdims=True)
                wanted = np.einsum("hqk,khd->qhd", shares, v[first:end])
                got = self.to_host(backend, found)[first:end]
                assert np.abs(got - wanted).max() < 0.02 * np.abs(wanted).max(), (dtype, first)

    @pytest.mark.capability("max_tensor_parallel_size")
    def test_collectives_between_two_processes(
        self, device: Any, fd_entry: Any, device_library: str
    ) -> None:
        if device.limits.max_tensor_parallel_size < 2:
            pytest.skip("limits.max_tensor_parallel_size is 1")
        results = run_ranks(fd_entry.name, device_library, 2)
        assert results[0] == results[1], "ranks disagree on a result that all must share"
        for name, passed in results[0].items():
            assert passed, f"{name} gives a wrong result"

    def test_memory_returns_to_the_baseline_after_100_cycles(self, device: Any) -> None:
        xp = device.xp

        def cycle() -> None:
            x = self.to_device(device, np.ones((64, 1024), "float32"))
            y = xp.matmul(x, x.transpose(0, 1))
            device.to_host(y)
            device.record_event()

        assert_memory_returns(device, cycle)

    def test_kept_weights_multiply_as_before(self, device: Any, kernels: Any, dtype: str) -> None:
        can_keep = isinstance(device, PackingDevice)
        if not can_keep:
            pytest.skip("the device keeps no weights (contracts.device.PackingDevice)")
        assert isinstance(device.weight_layout, str) and device.weight_layout
        draw, xp = np.random.default_rng(5), device.xp
        weight = self.to_device(device, draw.standard_normal((40, 96)).astype("float32"))
        x = self.to_device(device, draw.standard_normal((3, 96)).astype("float32"))
        weight, x = weight.to(xp.dtype(dtype)), x.to(xp.dtype(dtype))
        prepared = kernels.prepare("linear", weight)
        dumped = device.dump_weight(prepared)
        assert dumped is not None, "what the device's own kernel prepared is not kept"
        facts, arrays = dumped
        assert all(array.dtype == np.uint8 and array.ndim == 1 for array in arrays)
        facts, arrays = json.loads(json.dumps(facts)), [array.copy() for array in arrays]
        again = device.restore_weight(facts, arrays)
        expected = device.to_host(kernels["linear"](x, prepared, None).float()).copy()
        for array in arrays:
            array[:] = 0  # a mapping that ended
        got = device.to_host(kernels["linear"](x, again, None).float())
        assert np.array_equal(got, expected)
        with pytest.raises((ValueError, KeyError, TypeError)):
            device.restore_weight(facts, [array[:-1] for array in arrays])
        assert device.dump_weight(object()) is None

    def test_second_instance_works_beside_the_first(
        self, driver: Any, device: Any, device_library: str
    ) -> None:
        second = driver(DeviceOptions(tensor_library=device_library, num_threads=1))
        x = second.to_device(np.ones(3, "float32"))
        assert second.to_host(x + x).tolist() == [2, 2, 2]
        second.close()
        again = device.to_device(np.ones(3, "float32"))
        assert device.to_host(again).tolist() == [1, 1, 1], "closing one closed the other"

    def test_unknown_tensor_library_is_refused_clearly(self, driver: Any) -> None:
        from fastdeploy_core.errors import FastDeployError

        with pytest.raises(FastDeployError, match="nosuchlib"):
            driver(DeviceOptions(tensor_library="nosuchlib"))


class TestDevice(DeviceConformance):
    """Run by `fastdeploy plugins check`."""
