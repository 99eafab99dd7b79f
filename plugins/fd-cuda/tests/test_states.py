"""Kernels of layers that keep a state against the conformance kit, interpreted on the CPU or
compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import state_steps
import torch
import triton
import triton.language as tl
from fastdeploy_core.contracts.attention import StateQuestion, StateSpec

from fastdeploy_testing.conformance.test_state import StateConformance
from fd_cuda.attention.question import why_not_state
from fd_cuda.kernels.common import options
from fd_cuda.states.driver import CudaStates
from fd_cuda.states.recurrence import inverse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDEST = [
    StateSpec("delta", 2, 1, 256, 256, (256, 256, 512), 4, "bfloat16"),
    StateSpec("channel_delta", 2, 2, 256, 256, (512, 512, 512), 4, "bfloat16"),
    StateSpec("space", 4, 1, 256, 64, (256, 256, 256), 4, "bfloat16"),
    StateSpec("delta", 2, 2, 192, 96, (384, 384, 192), 4, "float16"),
]


class TestStates(StateConformance):
    """Built without asking whether it serves this device: the interpreter runs on any."""

    runs_on: ClassVar[str] = DEVICE

    @pytest.fixture(scope="class")
    @classmethod
    def fd_tensor(cls) -> str:
        return "torch"

    if DEVICE == "cpu":

        @pytest.fixture(params=["float32"])
        def dtype(self, request: pytest.FixtureRequest) -> str:
            """The interpreter has no shorter numbers of its own."""
            return str(request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Any:
        return CudaStates


@pytest.mark.skipif(DEVICE == "cpu", reason="16-bit products are a GPU's")
class TestWidestStates(TestStates):
    """Few chunks of these are loaded ahead, and with one alone compiled products were wrong."""

    @pytest.fixture(params=WIDEST, ids=str)
    def spec(self, request: pytest.FixtureRequest, dtype: str) -> StateSpec:
        spec = replace(request.param, dtype=dtype)
        if (spec.kind, dtype) == ("channel_delta", "float32"):
            pytest.skip("no card has the shared memory, and the driver declines it")
        return spec


@pytest.mark.parametrize("spec", state_steps.SPECS, ids=str)
def test_rows_of_nobody_leave_zeros_and_no_trace(spec: StateSpec) -> None:
    """In a captured step the host's numbers are bounds, and a row that stands in for a sequence
    has length 0 and a table that names blocks of others."""
    step = state_steps.Step(spec, CudaStates, (), DEVICE)
    before = [tensor.clone() for tensor in step.cache]
    step.x[1] = float("nan")
    out = step.run()
    assert (out[1] == 0).all() and out[0].isfinite().all() and (out[0] != 0).any()
    for old, new in zip(before, step.cache, strict=True):
        assert torch.equal(old[[0, 2]], new[[0, 2]]) and not torch.equal(old[1], new[1])


@pytest.mark.parametrize("spec", [state_steps.SPECS[3]], ids=str)
def test_a_prompt_cut_at_multiples_of_a_chunk_gives_the_same_bits(spec: StateSpec) -> None:
    """So a state that one sequence left is that which another would have computed."""
    whole = state_steps.Step(spec, CudaStates, (192,), DEVICE)
    found = []
    for cuts in ((192,), (64, 128), (128, 64)):
        for tensor in whole.cache:
            tensor.zero_()
        given, first, parts = whole.x, 0, []
        for count in cuts:
            table = torch.ones(1, 5, dtype=torch.int32).numpy()
            end = first + count
            batch = state_steps.AttentionBatch.upload(
                whole.driver._device.to_device, [0, count], [end], table, [0] * count, [0] * count
            )
            beta = None if whole.beta is None else whole.beta[first:end]
            metadata = whole.driver.prepare(batch)
            gates = whole.dt[first:end], beta
            fed = given[first:end], *gates, whole.weights, whole.cache, metadata
            parts.append(whole.driver.forward(*fed))
            first = end
        found.append([torch.cat(parts), *(tensor[1].clone() for tensor in whole.cache)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(("major", "kilobytes", "stages"), [(8, 99, 1), (9, 227, 2), (12, 99, 1)])
def test_chunks_of_wide_states_are_loaded_ahead_as_far_as_cards_have_room(
    monkeypatch: pytest.MonkeyPatch, major: int, kilobytes: int, stages: int
) -> None:
    """Two of these take 110,592 bytes where the compiler is asked for 12.0."""
    card = SimpleNamespace(major=major, shared_memory_per_block_optin=kilobytes << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    device: Any = SimpleNamespace(device="cuda")
    table: Any = {}
    assert CudaStates(WIDEST[0], 64, device, table).scan.num_stages == stages


@triton.jit
def invert(lower, found, PDL: tl.constexpr):
    i = tl.arange(0, 64)
    places = i[:, None] * 64 + i[None, :]
    tl.store(found + places, inverse(tl.load(lower + places), 64))


@pytest.mark.parametrize("repeats", [True, False])
def test_inverses_of_chunks_are_exact_where_keys_repeat(repeats: bool) -> None:
    """Pairs of equal keys are all 1, whose powers are large: sums of those would cancel digits."""
    torch.manual_seed(0)
    lower = (torch.ones(64, 64) if repeats else torch.rand(64, 64)).tril(-1).to(DEVICE)
    found = torch.empty_like(lower)
    invert[(1,)](lower, found, **options(num_warps=4))
    wanted = torch.linalg.inv((torch.eye(64, device=DEVICE) + lower).double())
    assert (found.double() - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"kind": "space"}, ""),
        ({"kind": "short_conv"}, ""),
        ({"key_dim": 512}, "states 512 wide; at most 256"),
        ({"kind": "channel_delta", "dtype": "bfloat16", "key_dim": 256}, ""),
        (
            {"kind": "channel_delta", "dtype": "float32", "key_dim": 256},
            "states 256 wide; at most 128",
        ),
        ({"conv_width": 32}, "convolutions over 32 tokens; at most 17"),
        ({"state_dtype": "float64"}, "dtype float64; possible: float32"),
    ],
)
def test_what_it_serves(changes: dict[str, Any], reason: str) -> None:
    spec = replace(state_steps.SPECS[0], **changes)
    assert why_not_state(StateQuestion("cuda", "torch", spec)).startswith(reason)
    assert bool(why_not_state(StateQuestion("cuda", "torch", spec))) == bool(reason)
    assert "runs on cuda" in why_not_state(StateQuestion("cpu", "torch", spec))
