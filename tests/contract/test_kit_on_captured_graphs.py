"""The kit's tests of captured graphs, on the testing device: what they ask can be met."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_testing.capturing import CapturingDevice, RecordableAttention
from fastdeploy_testing.conformance.test_attention import AttentionConformance
from fastdeploy_testing.conformance.test_device import DeviceConformance


@pytest.fixture(scope="module")
def capturing(tensor_library: str) -> CapturingDevice:
    return CapturingDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))


class Attention(AttentionConformance):
    def _backend(self, request: Any, device: Any, kernels: Any, spec: Any, size: int) -> Any:
        return RecordableAttention(spec, size, device, kernels)


def test_a_captured_decode_equals_an_eager_one(
    request: pytest.FixtureRequest, capturing: CapturingDevice
) -> None:
    from fastdeploy_core.plugins.kernels import build_kernel_table

    Attention().test_captured_decode_equals_eager(request, capturing, build_kernel_table("cpu"))


def test_a_driver_that_trusts_the_host_is_found_out(
    request: pytest.FixtureRequest, capturing: CapturingDevice
) -> None:
    from fastdeploy_core.plugins.kernels import build_kernel_table

    class Trusting(RecordableAttention):
        def prepare(self, batch: Any) -> Any:
            batch.seq_lens_dev = self._device.to_device(batch.seq_lens.copy())
            return super().prepare(batch)

    class OfTrusting(Attention):
        def _backend(self, request: Any, device: Any, kernels: Any, spec: Any, size: int) -> Any:
            return Trusting(spec, size, device, kernels)

    with pytest.raises(AssertionError):
        OfTrusting().test_captured_decode_equals_eager(
            request, capturing, build_kernel_table("cpu")
        )


def test_captured_graphs_and_copies_of_the_device(capturing: CapturingDevice) -> None:
    kit = DeviceConformance()
    kit.test_graph_equals_eager(capturing)
    kit.test_a_graph_beside_another_keeps_what_it_made_until_the_next_replay(capturing)
    for name in ("float32", "int64", "int32"):
        kit.test_queued_copies_arrive_by_the_next_event(capturing, name)
