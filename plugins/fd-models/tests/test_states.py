"""The conformance kit on driver `plain`, and on drivers with one fault each, which must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fd_models.recurrent.nemotron_h import SquaredExperts
from fd_models.recurrent.states import PlainStates

from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.layers import DriverFactories, ModelBuilder
from fastdeploy_core.models.reading import ConfigReader
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.tensor import available
from fastdeploy_testing.conformance.test_state import SPECS, StateConformance


class TestPlain(StateConformance):
    driver_name = "plain"


class ReadsAtTheStart(PlainStates):
    """A new sequence begins with what lies in its block."""

    def _old(self, kept: Any, rows: Any) -> Any:
        return self._xp.index_select(kept, 0, rows.sources)


class OverwritesItsSource(PlainStates):
    """The state goes on in the block that it was read from."""

    def prepare(self, batch: Any) -> Any:
        rows = super().prepare(batch)
        for row in rows:
            row.targets = row.sources
        return rows


class ForgetsBetweenSteps(PlainStates):
    """Each step begins with zeros."""

    def prepare(self, batch: Any) -> Any:
        rows = super().prepare(batch)
        for row in rows:
            row.is_new = row.targets >= 0
        return rows


class TakesOtherKeyHeads(PlainStates):
    """Key heads alternate instead of standing side by side."""

    def _keys(self, x: Any) -> Any:
        spec = self.spec
        heads = x.reshape([x.shape[0], spec.num_key_heads, spec.key_dim])
        return self._xp.cat([heads] * (spec.num_heads // spec.num_key_heads), 1)


class KeepsAHalf(PlainStates):
    """The state is rounded between steps."""

    def _old(self, kept: Any, rows: Any) -> Any:
        return super()._old(kept, rows).to(self._xp.bfloat16).to(kept.dtype)


class KeepsTheLastAlone(PlainStates):
    """Refused drafts are in the state."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._places = 1


class FeedsPadding(PlainStates):
    """What stands after a row's last token counts as fed."""

    def _captured(self, batch: Any) -> Any:
        return super()._captured(replace(batch, slot_mapping=batch.slot_mapping * 0))


class Named:
    """Adapters that note which layers ask for them."""

    def __init__(self) -> None:
        self.layers: list[str] = []

    def watch(self, kernels: Any) -> Any:
        return kernels

    def layer(self, build: Any, spec: Any, *pieces: Any) -> None:
        self.layers.append(spec.name)


def test_experts_that_see_some_rows_of_a_step_take_no_adapters() -> None:
    device = CpuDevice(DeviceOptions(tensor_library=available()[0]))
    adapters: Any = Named()
    kernels, drivers = build_kernel_table("cpu"), DriverFactories(None, None)  # type: ignore[arg-type]
    build = ModelBuilder(
        device, kernels, "float32", max_positions=8, drivers=drivers, adapters=adapters
    )
    sizes = {
        "hidden_size": 16,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8,
    }
    SquaredExperts(build, "mlp", ConfigReader(sizes))
    assert adapters.layers == ["mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"]
    assert build.adapters is adapters
    device.close()


Check = Callable[..., None]
CUT = StateConformance.test_sequences_cut_anywhere_and_mixed_equal_the_recurrence
KEPT = StateConformance.test_a_state_that_was_left_stays_and_others_go_on_from_it
DRAFTS = partial(StateConformance.test_refused_drafts_leave_no_trace, is_captured=False)
CAPTURED = partial(StateConformance.test_refused_drafts_leave_no_trace, is_captured=True)


@pytest.mark.parametrize("name", ["delta", "space"])
@pytest.mark.parametrize(
    ("driver", "check"),
    [
        (ReadsAtTheStart, CUT),
        (OverwritesItsSource, KEPT),
        (ForgetsBetweenSteps, CUT),
        (TakesOtherKeyHeads, CUT),
        (KeepsAHalf, CUT),
        (KeepsTheLastAlone, DRAFTS),
        (FeedsPadding, CAPTURED),
    ],
)
def test_a_driver_with_a_fault_fails(
    driver: type[PlainStates], check: Check, name: str, fd_tensor: str
) -> None:
    from fastdeploy_core.contracts.device import DeviceOptions
    from fastdeploy_core.plugins.kernels import build_kernel_table
    from fastdeploy_core.reference.device import CpuDevice

    device = CpuDevice(DeviceOptions(tensor_library=fd_tensor, num_threads=1))
    spec = replace(SPECS[name], dtype="float32")
    given = (StateConformance(), driver, device, build_kernel_table("cpu"), spec)
    with device.xp.no_grad(), pytest.raises(AssertionError):
        check(*given)
    device.close()
