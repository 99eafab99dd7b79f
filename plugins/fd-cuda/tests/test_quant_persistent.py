"""quant_persistent.cu against dequantization in float64: emulated, the copy engine included, or on
the GPU."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from fastdeploy_core.contracts.quant_formats import PackedWeight
from packed_weights import packed as packed_on
from quant_emulation import use_kernels
from test_quant_native import DEVICE, HAS_GPU, check, rounded

from fd_cuda.kernels import quant_experts, quant_linear, quant_weights
from fd_cuda.kernels.experts import combined
from fd_cuda.kernels.quant_grouped import grouped_shape
from fd_cuda.kernels.quant_layout import FP8_ROWS, INT4, INT8, INT8_ROWS
from fd_cuda.kernels.quant_native import Grouping
from fd_cuda.kernels.quant_order import gathered
from fd_cuda.kernels.quant_persistent import persistent_product
from fd_cuda.kernels.quant_shapes import MOST_DYNAMIC, Persistent, persistent, persistent_shared
from fd_cuda.kernels.routing import Order, order_by_expert

pytestmark = pytest.mark.skipif(not HAS_GPU and shutil.which("g++") is None, reason="needs g++")
# Format, outputs, inputs, group, dtype, rows of x, rows of a tile.
Case = tuple[str, int, int, int, torch.dtype, int, int]
SMALL: list[Case] = [
    ("wint4", 136, 200, 0, torch.bfloat16, 70, 64),
    ("wint8_zp", 264, 320, 64, torch.float16, 33, 32),
    ("wfp8", 600, 136, 0, torch.bfloat16, 17, 16),
    ("w8a8", 264, 400, 0, torch.bfloat16, 40, 64),
    ("wfp8afp8", 136, 272, 0, torch.float16, 40, 32),
    ("block_fp8", 200, 656, 0, torch.bfloat16, 33, 32),
    ("block_fp8", 264, 1040, 0, torch.float16, 70, 64),
]
LARGE: list[Case] = [
    (name, 1032, 1024, 0, torch.bfloat16, 900, rows)
    for name in ("wint4", "wint8", "w8a8", "wfp8afp8")
    for rows in (128, 208, 256)
]
LARGE += [("block_fp8", 1032, 1040, 0, torch.bfloat16, 900, rows) for rows in (64, 128)]


@pytest.fixture(autouse=True)
def kernels(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(tmp_path_factory.getbasetemp(), monkeypatch)


def test_blocks_have_the_shared_memory_that_turns_take() -> None:
    for name, rows, count, group, _, _, tile in (*SMALL, *LARGE):
        slabs = quant_weights.prepare(made(name, rows, count, group)).slabs
        assert slabs is not None
        shape = persistent(tile, slabs.kind)
        assert shape.stages > 2
        assert persistent_shared(shape, slabs.kind) <= MOST_DYNAMIC


def made(name: str, rows: int, count: int, group: int = 0, experts: int = 0) -> PackedWeight:
    torch.manual_seed(rows + count)
    return packed_on(name, rows, count, group, experts, DEVICE)


@pytest.mark.parametrize("case", [*SMALL, *(LARGE if HAS_GPU else [])], ids=str)
def test_product(case: Case) -> None:
    name, rows, count, group, dtype, tokens, tile = case
    slabs = quant_weights.prepare(made(name, rows, count, group)).slabs
    assert slabs is not None
    bias = torch.randn(rows, device=DEVICE).to(dtype)
    if slabs.kind in (INT8_ROWS, FP8_ROWS):
        x, scales, meant = rounded(name, tokens, count)
    else:
        # int4 with rounded activations: float16 numbers, and what each row is multiplied with.
        x = torch.randn(tokens, count, device=DEVICE).to(dtype)
        scales = torch.rand(tokens, device=DEVICE) + 0.5 if dtype == torch.float16 else None
        meant = x.double() if scales is None else x.double() * scales[:, None].double()
    expected = meant @ quant_weights.dequantized(slabs, torch.float32).double().T + bias.double()
    for _ in range(20 if HAS_GPU else 1):
        got = persistent_product(persistent(tile, slabs.kind), x, scales, slabs, bias, dtype)
        check(got, expected, dtype)
    # Tiles of 64 outputs, and blocks that divide K, of which some have no turn.
    for groups, split in (
        (1, 1),
        (2, 2),
        (1, 2 if tile == 208 else 8),
    ):  # whole eights of rows each
        other = persistent(tile, slabs.kind, groups, split)
        check(persistent_product(other, x, scales, slabs, bias, dtype), expected, dtype)


@pytest.mark.parametrize(
    ("name", "group", "tokens", "block"),
    [
        ("wint4", 0, 12, 16),
        ("wint8", 0, 12, 16),
        ("wint4_zp", 64, 12, 16),
        ("wfp8", 0, 12, 16),
        ("w8a8", 0, 12, 16),
        ("wfp8afp8", 0, 12, 16),
        ("block_fp8", 0, 12, 16),
        ("wint4", 0, 120, 160),  # of a block of one row, 32 are brought and 64 are computed
        ("wint4_zp", 64, 100, 128),
    ],
)
def test_experts_pair_gate_and_up(name: str, group: int, tokens: int, block: int) -> None:
    """Rows gathered by expert, two blocks of one of them, and an unused block."""
    experts, inner, hidden = 2, 192 if name == "block_fp8" else 112, 256
    weight = quant_weights.prepare(made(name, 2 * inner, hidden, group, experts))
    slabs = weight.slabs
    assert slabs is not None
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    meant = weight.seen(x).double()
    ids = torch.tensor([[0, 1]] + [[1, 1]] * (tokens - 1), device=DEVICE)
    slots = 2 * tokens
    own = [torch.nonzero(ids.view(-1) == e)[:, 0] for e in range(experts)]
    rows = torch.full((4, block), slots, dtype=torch.int32, device=DEVICE)
    rows[0, :1], rows[1], rows[3, : len(own[1]) - block] = own[0], own[1][:block], own[1][block:]
    stands = torch.tensor([rows.view(-1).tolist().index(n) for n in range(slots)])
    places = stands.to(device=DEVICE, dtype=torch.int32)
    blocks = torch.tensor([0, 1, -1, 1], dtype=torch.int32, device=DEVICE)
    order = Order(rows.view(-1), blocks, places)
    given, of_rows = gathered(x, order, slots, 2), None
    if weight.rounding:
        given, of_rows = weight.numbers(x, into=order)
    got, plain = (
        persistent_product(
            persistent(block, slabs.kind), given, of_rows, slabs, None, torch.bfloat16,
            grouping=Grouping(slots, 1, order), paired=paired,
        )
        for paired in (True, False)
    )  # fmt: skip
    wide = quant_weights.dequantized(slabs, torch.float32).double()
    for place, slot in enumerate(rows.view(-1).tolist()):
        if slot == slots:
            continue
        y = meant[slot // 2] @ wide[int(ids.view(-1)[slot])].T
        check(got[place], torch.nn.functional.silu(y[:inner]) * y[inner:], torch.bfloat16)
        check(plain[slot], y, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "is_grouped"),
    [("wint4", False), ("wfp8afp8", False), ("w8a8", False), ("wint4", True), ("w4a8", True)],
)
def test_layer_of_experts(name: str, is_grouped: bool) -> None:
    """Both products of every assignment, and their weighted sum, here or by quant_grouped.cu."""
    experts, inner, hidden, tokens = 3, 128, 256, 40
    gate_up, down = (
        quant_weights.prepare(made(name, *shape, 0, experts))
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    assert gate_up.slabs is not None and down.slabs is not None
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)]).to(DEVICE)
    shares = torch.rand(tokens, 2, device=DEVICE)
    both = (gate_up, gate_up.slabs), (down, down.slabs)
    kind = gate_up.slabs.kind
    shape = grouped_shape(kind, rounds=name == "w4a8") if is_grouped else persistent(16, kind)
    order = order_by_expert(ids, experts, shape.rows)
    y = quant_experts.in_blocks(shape, x, order, 2 * tokens, 2, *both)
    got = combined(y, shares)
    first, second = (w.dequantized(torch.float32).double() for w in (gate_up, down))
    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=DEVICE)
    for token in range(tokens):
        for nth, expert in enumerate(ids[token].tolist()):
            wide = gate_up.seen(x[token : token + 1]).double() @ first[expert].T
            inside = (torch.nn.functional.silu(wide[:, :inner]) * wide[:, inner:]).bfloat16()
            y = down.seen(inside).double() @ second[expert].T
            expected[token] += shares[token, nth] * y[0]
    # What lies between the products is rounded by formats: a number on the edge may go to either
    # side.
    error = float((got.double() - expected).norm() / expected.norm())
    assert error < 2e-2, f"off by {error:.2g}"


def test_blocks_of_an_expert_are_counted_as_they_fall() -> None:
    torch.manual_seed(0)
    for each, rows in ((96, 128), (192, 208), (192, 192), (384, 160), (384, 208)):
        ids = torch.randint(0, 64, (200, 64 * each))
        counts = torch.stack([torch.bincount(own, minlength=64) for own in ids])
        expected = float((-(-counts // rows)).double().mean())
        assert quant_experts.blocks_of(each, rows) == pytest.approx(expected, rel=0.02)


def test_experts_of_many_rows_have_hardly_more_blocks_than_rows_fill() -> None:
    for each in range(quant_experts._MANY_EACH + 1, 2000):
        rows = quant_experts.persistent_rows(each)
        assert quant_experts.blocks_of(each, rows) * rows < 1.6 * each
    assert [quant_experts.persistent_rows(each) for each in (96, 192, 256, 384)] == [
        128,
        208,
        160,
        208,
    ]


@pytest.mark.parametrize(
    ("kind", "width", "depth", "rows", "shape"),
    [
        (INT4, 8192, 8192, 32, (32, 2, 2)),  # two halves of K: a block for nearly every processor
        (INT4, 8192, 8192, 128, (128, 2, 2)),
        (INT8, 8192, 8192, 140, (160, 2, 2)),
        (INT8, 8192, 8192, 1024, (256, 2, 1)),
        (INT4, 12288, 2560, 64, (64, 2, 1)),
        (INT4, 12288, 2560, 128, (128, 2, 1)),
        (INT8, 4096, 4096, 64, (64, 1, 2)),  # tiles of 64 outputs
        (INT8, 6144, 1024, 128, (128, 1, 1)),
        (INT8, 1024, 3072, 100, None),  # quant_tile.cu
        (INT8_ROWS, 6144, 1024, 4096, (256, 2, 1)),
        (INT8_ROWS, 1024, 3072, 512, (64, 1, 1)),
        (INT8_ROWS, 1024, 3072, 16, (16, 1, 4)),
        (INT8_ROWS, 2048, 2048, 16, (16, 2, 4)),
        (INT8_ROWS, 4096, 4096, 65, (96, 1, 1)),  # one tile has all rows
        (INT8_ROWS, 8192, 8192, 100, (128, 2, 1)),
    ],
)
def test_layers_that_keep_the_gpu_busy_go_by_tiles(
    kind: int,
    width: int,
    depth: int,
    rows: int,
    shape: tuple[int, int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quant_linear, "num_processors", lambda: 132)
    none = torch.empty(0)
    slabs = quant_weights.Slabs(kind, width, depth, 0, none, none, None, 0)
    own = quant_linear.choose(slabs, rows, rounds=kind == INT8_ROWS)
    tiles = (own.rows, own.groups, own.split) if isinstance(own, Persistent) else None
    assert tiles == shape
