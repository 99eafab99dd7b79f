"""What the bases know without a chip: memory, numbers of chips, vendors' operators."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fd_accelerator.accelerator import GIB, Accelerator, AcceleratorFacts, gib_in
from fd_accelerator.paddle_device import PaddleFacts, versions
from fd_accelerator.vendor_operators import VendorOperators, answer_attention, answer_moe

from fastdeploy_core.contracts.attention import AttentionQuestion
from fastdeploy_core.contracts.base import Accept, Decline
from fastdeploy_core.contracts.device import DeviceLimits
from fastdeploy_core.contracts.model import AttentionSpec
from fastdeploy_core.contracts.moe import MoEQuestion, MoESpec, RoutingSpec
from fastdeploy_core.errors import CapabilityError, ConfigError, PluginLoadError

LIMITS = DeviceLimits(max_tensor_parallel_size=2)


class Chip(Accelerator):
    """A base over a place whose driver says what the test says."""

    name, limits = "chip", LIMITS
    facts = AcceleratorFacts(
        name="chip", type_name="chip", limits=LIMITS, visible_env=("CHIP_VISIBLE",)
    )

    def __init__(self, driver: tuple[int, int] | None, reserved: int = 0) -> None:
        self._place = SimpleNamespace(driver_memory=lambda: driver, reserved_bytes=lambda: reserved)


def test_memory_is_the_drivers_then_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_DEVICE_MEMORY_GIB", "2")
    told = Chip((5, 7)).memory()
    assert (told.free_bytes, told.total_bytes) == (5, 7)
    given = Chip(None, reserved=GIB // 2).memory()
    assert (given.free_bytes, given.total_bytes) == (GIB * 3 // 2, 2 * GIB)
    assert Chip(None, reserved=3 * GIB).memory().free_bytes == 0


def test_unknown_memory_says_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FD_DEVICE_MEMORY_GIB", raising=False)
    with pytest.raises(ConfigError, match="its driver does not tell; set FD_DEVICE_MEMORY_GIB"):
        Chip(None).memory()


@pytest.mark.parametrize("text", ["plenty", "-1", "nan", "inf", "1e9"])
def test_a_variable_that_is_no_size_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_DEVICE_MEMORY_GIB", text)
    with pytest.raises(ConfigError, match=f"FD_DEVICE_MEMORY_GIB cannot be read: got '{text}'"):
        Chip(None).memory()


def test_a_size_has_a_default_and_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHIP_KV_GIB", raising=False)
    assert gib_in("CHIP_KV_GIB", 1.5) == GIB * 3 // 2
    assert gib_in("", 1.0) == GIB
    monkeypatch.setenv("CHIP_KV_GIB", " 0.25 ")
    assert gib_in("CHIP_KV_GIB", 1.5) == GIB // 4


def test_a_missing_chip_is_named_with_the_variable_that_hides_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHIP_VISIBLE", "3")
    chip = Chip(None)
    chip._check_index(0, 1)
    with pytest.raises(ConfigError, match=r"no chip 1: 1 visible \(CHIP_VISIBLE=3\)"):
        chip._check_index(1, 1)
    with pytest.raises(CapabilityError, match="at most 2 ranks; asked for 4"):
        chip._check_world(4)


def test_environment_of_a_runtime_leaves_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHIP_A", "mine")
    monkeypatch.delenv("CHIP_B", raising=False)
    facts = AcceleratorFacts(
        name="chip", type_name="chip", limits=LIMITS, environment=(("CHIP_A", "1"), ("CHIP_B", "2"))
    )
    facts.prepare_environment()
    assert (os.environ["CHIP_A"], os.environ.pop("CHIP_B")) == ("mine", "2")


def test_versions_say_whether_the_pair_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from fd_accelerator import paddle_device

    installed = {"paddlepaddle": "3.3.1", "paddle-chip": "1.0"}
    monkeypatch.setattr(paddle_device, "installed_version", lambda name: installed.get(name, ""))
    facts = PaddleFacts(
        name="chip", type_name="chip", limits=LIMITS, packages=("paddle-chip",),
        tested_versions=(("3.3.1", "1.0"),),
    )  # fmt: skip
    assert versions(facts) == "PaddlePaddle 3.3.1 with paddle-chip 1.0: a known pair"
    installed["paddle-chip"] = "1.1"
    assert "1.1: not a known pair (known: 3.3.1 with 1.0)" in versions(facts)


def _operators(**found: Any) -> VendorOperators:
    operators = VendorOperators("no_such_vendor_ops", aliases={"rotate": "rotate_v2"})
    operators.use(SimpleNamespace(**found))
    return operators


def test_operators_are_found_by_either_name() -> None:
    operators = _operators(attend=abs, rotate_v2=round)
    assert operators["attend"] is abs and operators["rotate"] is round
    assert operators.has("attend", "rotate") and not operators.has("attend", "route")
    assert operators.missing("attend", "route", "drop") == "route, drop"
    with pytest.raises(PluginLoadError, match="'route' is not installed; looked in no_such_vendor"):
        operators["route"]


def test_a_package_that_is_not_installed_has_no_operators() -> None:
    assert not VendorOperators("no_such_vendor_ops").has("attend")


def _attention(**changes: Any) -> Accept | Decline:
    spec = AttentionSpec(
        kind="gqa", num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, scale=0.25,
        dtype="bfloat16",
    )  # fmt: skip
    asked = {"device": "chip", "tensor_library": "paddle", "spec": spec, "block_size": 64}
    asked["kv_dtype"] = "auto"
    operators = _operators(attend=abs)
    found = answer_attention(
        AttentionQuestion(**(asked | changes)), driver="chip_flash", device="chip",
        operators=operators, needed=("attend",), dtypes=("bfloat16",),
    )  # fmt: skip
    assert found.name == "chip_flash"
    return found.verdict


def test_attention_of_vendors_operators_takes_what_these_take() -> None:
    assert isinstance(_attention(), Accept)
    for changes, words in (
        ({"device": "other"}, "runs on device 'chip' only"),
        ({"tensor_library": "torch"}, "take PaddlePaddle's tensors"),
        ({"kv_dtype": "int8"}, "with cache int8"),
    ):
        verdict = _attention(**changes)
        assert isinstance(verdict, Decline) and words in verdict.reason


def test_experts_of_vendors_operators_take_what_these_take() -> None:
    def verdict(device: str = "chip", quantization: str = "", **routing: Any) -> Any:
        spec = MoESpec(RoutingSpec(4, 2, **routing), 8, 12, "bfloat16")
        question = MoEQuestion(device, "paddle", spec, quantization)
        return answer_moe(
            question, driver="chip_moe", device="chip", operators=_operators(route=abs),
            needed=("route",), dtypes=("bfloat16",),
        ).verdict  # fmt: skip

    assert isinstance(verdict(), Accept)
    assert "runs on device" in verdict("other").reason
    assert "wint4" in verdict(quantization="wint4").reason
    assert "softmax" in verdict(scoring="sigmoid").reason
    assert "add up to 1" in verdict(renormalize=False).reason


@pytest.mark.parametrize("module", ["paddle_device", "torch_device", "vendor_operators"])
def test_importing_a_base_imports_no_tensor_library(module: str) -> None:
    code = (
        f"import sys, fd_accelerator.{module}\n"
        "loaded = sorted({'torch', 'paddle'} & set(sys.modules))\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
