"""quant_grouped.cu against dequantization in float64: emulated, the copy engine included, or on the
GPU."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from fastdeploy_core.contracts.quant_formats import PackedWeight
from fd_models.clamped import moe_experts_clamped
from packed_weights import packed
from quant_emulation import use_kernels
from test_clamped import matrices
from test_quant_native import DEVICE, HAS_GPU, check

from fd_cuda.kernels import native, quant_any, quant_grouped, quant_weights
from fd_cuda.kernels.quant_grouped import grouped_product, of_slabs
from fd_cuda.kernels.quant_layout import INT4, INT8, MXFP4
from fd_cuda.kernels.quant_shapes import MOST_DYNAMIC, Grouped, grouped_shared
from fd_cuda.kernels.routing import Order

pytestmark = pytest.mark.skipif(not HAS_GPU and shutil.which("g++") is None, reason="needs g++")
# Rows of each block: every size that is computed, whole eights and not.
COUNTS = (1, 13, 64, 20, 30, 41)


@pytest.fixture(autouse=True)
def kernels(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(tmp_path_factory.getbasetemp(), monkeypatch)
    monkeypatch.setattr(quant_grouped, "num_processors", lambda: 3)  # several tiles of each


def in_blocks(counts: tuple[int, ...], rows: int, experts: int) -> Order:
    """Slots in no order, in blocks of which one is nobody's."""
    slots = torch.full((len(counts) + 1, rows), sum(counts), dtype=torch.int32)
    for own, given in zip(slots, torch.randperm(sum(counts)).split(counts), strict=False):
        own[: len(given)] = given
    of = [nth % experts for nth in range(len(counts))]
    return Order(slots.view(-1).to(DEVICE), torch.tensor([*of, -1], dtype=torch.int32).to(DEVICE))


@pytest.mark.parametrize(
    ("counts", "shape"),
    [
        (COUNTS, Grouped(64, 2, 3)),
        ((64, 65, 128), Grouped(128, 2, 3)),
        ((1, 13, 32, 20, 30), Grouped(32, 2, 3, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "group", "inputs"),
    [
        ("wint4", 0, 208),
        ("w4a8", 0, 336),
        ("wint8_zp", 64, 192),
        ("wint4", 64, 192),
        ("wfp8", 0, 72),
    ],
)
def test_products_of_every_number_of_rows(
    name: str, group: int, inputs: int, counts: tuple[int, ...], shape: Grouped
) -> None:
    """Outputs that fill no tile, inputs that fill no step."""
    torch.manual_seed(inputs)
    inner, experts = 144, 4
    weight = quant_weights.prepare(packed(name, 2 * inner, inputs, group, experts, DEVICE))
    slabs = weight.slabs
    assert slabs is not None
    order, num_slots = in_blocks(counts, shape.rows, experts), sum(counts)
    scales, dtype = None, torch.bfloat16
    given = torch.randn(len(order.slots), inputs, device=DEVICE).to(dtype)
    meant = given.double()
    if weight.rounding:
        numbers = torch.randint(-127, 128, given.shape, dtype=torch.int8, device=DEVICE)
        scales = torch.rand(len(given), device=DEVICE) + 0.5
        meant = numbers.double() * scales[:, None].double()
        given = numbers.view(len(numbers), -1, 2, 8).transpose(2, 3).reshape(numbers.shape)
    matrix = of_slabs(shape, slabs, dtype)
    gated, plain = (
        grouped_product(
            shape, given, scales, matrix, dtype, order, num_slots, paired=paired
        )
        for paired in (True, False)
    )  # fmt: skip
    wide = quant_weights.dequantized(slabs, torch.float32).double()
    for place, slot in enumerate(order.slots.tolist()):
        if slot == num_slots:
            continue
        y = meant[place] @ wide[int(order.experts[place // shape.rows])].T
        check(gated[place], torch.nn.functional.silu(y[:inner]) * y[inner:], dtype)
        check(plain[slot], y, dtype)


@pytest.mark.parametrize(("hidden", "inner"), [(224, 160), (256, 96)])
@pytest.mark.parametrize(("tokens", "has_down_bias"), [(1, True), (24, True), (40, False)])
def test_experts_of_mxfp4_with_biases(
    hidden: int, inner: int, tokens: int, has_down_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row an expert, as many as are multiplied by mma.sync, and as many as are by wgmma."""
    torch.manual_seed(hidden)
    experts, clamp = 4, (1.702, 1.5)
    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(native, "has_wgmma", lambda: True)
    launched, function = [], native.function

    def noted(name: str, defines: dict[str, int]) -> Any:
        launched.append(name)
        return function(name, defines)

    monkeypatch.setattr(native, "function", noted)
    weights = matrices((experts, hidden, inner), True, torch.bfloat16)
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    biases = [torch.randn(experts, n, device=DEVICE).bfloat16() for n in (2 * inner, hidden)]
    ids = torch.rand(tokens, experts, device=DEVICE).topk(2, 1).indices
    shares = torch.rand(tokens, 2, device=DEVICE)
    gate_up, down = (quant_any.prepare(weight) for weight in weights)
    assert isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight)
    own = biases[1] if has_down_bias else None
    got = quant_any.moe_experts_clamped(
        x, ids, shares, gate_up, biases[0], down, own, *clamp
    ).double()
    wide = None if own is None else own.double()
    wanted = moe_experts_clamped(
        x.double(), ids, shares, weights[0], biases[0].double(), weights[1], wide, *clamp
    )
    assert (got - wanted).norm() / wanted.norm() < 5e-3
    assert launched == ["quant_grouped"] * 2


def test_blocks_have_the_shared_memory_that_steps_take() -> None:
    for kind in (INT4, INT8, MXFP4):
        for is_int8 in (False, True):
            shape = quant_grouped.grouped_shape(kind, rounds=is_int8)
            assert shape.stages > 3
            assert grouped_shared(shape, kind, is_int8=is_int8) <= MOST_DYNAMIC
