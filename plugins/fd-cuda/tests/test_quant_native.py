"""The CUDA C++ kernels of packed weights against dequantization in float64: emulated, or on the
GPU."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import packed_weights
import pytest
import torch
from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_emulation import use_kernels

from fd_cuda.kernels import quant_experts, quant_linear, quant_weights
from fd_cuda.kernels.quant_layout import (
    FP8,
    FP8_ROWS,
    INT4,
    INT8,
    Slabs,
    pack_codes,
    pack_slabs,
    unpack_codes,
    unpack_slabs,
)
from fd_cuda.kernels.quant_native import Grouping, product, unpack
from fd_cuda.kernels.quant_persistent import persistent_product
from fd_cuda.kernels.quant_shapes import (
    MOST_DYNAMIC,
    MOST_SHARED,
    Few,
    Grouped,
    Persistent,
    Tile,
    few_shared,
    grouped_shared,
    persistent_shared,
    tile_shared,
)
from fd_cuda.kernels.routing import Order

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = pytest.mark.skipif(not HAS_GPU and shutil.which("g++") is None, reason="needs g++")
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def kernels(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(tmp_path_factory.getbasetemp(), monkeypatch)


def packed(name: str, rows: int, count: int, group: int = 0) -> PackedWeight:
    torch.manual_seed(rows + count)
    return packed_weights.packed(name, rows, count, group, 0, DEVICE)


def check(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((got.double() - expected).norm() / expected.norm())
    assert error < TOLERANCE[dtype], f"off by {error:.2g}"


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([INT4, INT8]),
    rows=st.integers(1, 50),
    count=st.integers(1, 200),
    experts=st.integers(0, 2),
)
def test_packing_goes_both_ways(kind: int, rows: int, count: int, experts: int) -> None:
    lead = (experts,) if experts else ()
    numbers = torch.randint(0, 16 if kind == INT4 else 256, (*lead, rows, count), dtype=torch.uint8)
    back = unpack_slabs(pack_slabs(numbers, kind), kind)
    assert torch.equal(back[..., :rows, :count], numbers)
    # What fills up slabs is zero: it meets inputs that are not there.
    assert (back[..., rows:, :] == (8 if kind == INT4 else 0)).all()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 50), quarters=st.integers(1, 60))
def test_packing_codes_goes_both_ways(rows: int, quarters: int) -> None:
    stored = torch.randint(0, 256, (quarters, rows), dtype=torch.uint8)
    back = unpack_codes(pack_codes(stored))
    assert torch.equal(back[:rows, :quarters], stored.t())


# Format, outputs, inputs, group, dtype, rows of x, kernel.
Case = tuple[str, int, int, int, torch.dtype, int, Few | Tile]
CASES: list[Case] = [
    ("wint4", 40, 136, 0, torch.bfloat16, 5, Few(1, 1, 2, 2, 1)),
    ("wint4", 64, 256, 64, torch.bfloat16, 9, Few(2, 2, 4, 2, 1)),
    ("wint4_zp", 32, 256, 128, torch.float16, 3, Few(1, 2, 2, 4, 1)),
    ("wint8", 40, 200, 0, torch.float16, 1, Few(1, 1, 2, 2, 1)),
    ("wint4", 40, 712, 0, torch.bfloat16, 9, Few(2, 2, 2, 4, 2)),
    ("wint4_zp", 32, 1280, 128, torch.float16, 3, Few(1, 2, 2, 2, 1)),
    ("wint4", 80, 1280, 128, torch.bfloat16, 7, Few(1, 4, 4, 3, 2)),
    ("wint8", 40, 200, 0, torch.float16, 9, Few(2, 1, 2, 2, 2)),
    ("wint8", 168, 200, 0, torch.bfloat16, 3, Few(1, 5, 3, 2, 1)),
    ("wint8_zp", 32, 512, 128, torch.bfloat16, 5, Few(1, 2, 2, 3, 1)),
    ("wfp8", 32, 640, 0, torch.bfloat16, 4, Few(1, 1, 2, 4, 2)),
    ("wint8_zp", 32, 128, 128, torch.bfloat16, 8, Few(1, 2, 2, 2, 1)),
    ("wfp8", 32, 128, 0, torch.bfloat16, 4, Few(1, 1, 2, 2, 1)),
    ("w8a8", 40, 208, 0, torch.bfloat16, 3, Few(1, 1, 2, 2, 1)),
    ("wfp8afp8", 40, 144, 0, torch.float16, 3, Few(1, 2, 2, 2, 1)),
    ("block_fp8", 160, 320, 0, torch.bfloat16, 3, Few(1, 2, 4, 2, 1)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_product(case: Case) -> None:
    check_product(case)


def check_product(case: Case) -> None:
    name, rows, count, group, dtype, tokens, shape = case
    weight = packed(name, rows, count, group)
    slabs = quant_weights.prepare(weight).slabs
    assert slabs is not None
    x = torch.randn(tokens, count + 8, device=DEVICE).to(dtype)[:, :count]
    bias = torch.randn(rows, device=DEVICE).to(dtype)
    expected = x.double() @ weight.dequantize().double().T + bias.double()
    check(product(shape, x, slabs, bias), expected, dtype)


def test_weights_that_the_kernel_before_unpacks_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels overlap: a product asks for its weights before the kernel in front has ended, unless
    that one writes them."""
    rows, count, tokens = (1024, 3072, 4096) if HAS_GPU else (48, 64, 300)
    weight, told = quant_weights.prepare(packed("w4a8", rows, count)), []

    def watched(*arguments: Any, **options: Any) -> torch.Tensor:
        told.append(options["is_fresh"])
        return persistent_product(*arguments, **options)

    monkeypatch.setattr(quant_linear, "persistent_product", watched)
    monkeypatch.setattr(quant_linear, "native_runs", lambda x: True)
    x = torch.randn(tokens, count, device=DEVICE).to(torch.bfloat16)
    assert weight.slabs is not None
    expected = (
        weight.seen(x).double() @ quant_weights.dequantized(weight.slabs, torch.float32).double().T
    )
    for _ in range(20 if HAS_GPU else 1):
        check(quant_linear.linear(x, weight, None), expected, torch.bfloat16)
    assert set(told) == {True}


def rounded(name: str, tokens: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers as a format rounds activations, their scales, and what they mean."""
    x = torch.randn(tokens, count, device=DEVICE) * 20
    if name == "w8a8":
        numbers, scales = x.round().to(torch.int8), torch.rand(tokens, device=DEVICE) + 0.5
        return numbers, scales, numbers.double() * scales[:, None].double()
    numbers = x.to(torch.float8_e4m3fn)
    if name == "wfp8afp8":
        scales = torch.rand(tokens, device=DEVICE) + 0.5
        return numbers, scales, numbers.double() * scales[:, None].double()
    scales = torch.rand(-(-count // 128), tokens, device=DEVICE).t() + 0.5
    spread = scales.repeat_interleave(128, 1)[:, :count]
    return numbers, scales, numbers.double() * spread.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_published_two_bits(dtype: torch.dtype) -> None:
    """Against the layout's description, byte by byte."""
    rows, count = 40, 256
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (count // 4, rows)).astype(np.uint8)
    local = rng.integers(1, 256, (count // 128, rows)).astype(np.uint8)
    outer = rng.uniform(0.5, 1, rows).astype(np.float32)
    scale, zero = (
        rng.uniform(118, 122, rows).astype(np.float32),
        rng.uniform(-60, 480, rows).astype(np.float32),
    )
    dense = np.empty((rows, count))
    for n, k in np.ndindex(rows, count):
        code = int(
            np.floor(
                np.float32(np.float32(stored[k // 4, n]) * scale[n]) + zero[n] + np.float32(0.5)
            )
        )
        nibble = local[k // 128, n] >> (0 if k // 64 % 2 else 4) & 15
        dense[n, k] = ((code >> (9 - 3 * (k % 4)) & 63) - 32) * float(nibble) * float(outer[n])
    held = {
        "weight": stored,
        "scale": local,
        "super_scale": outer,
        "code_scale": scale,
        "code_zero": zero,
    }
    tensors = {key: torch.from_numpy(value).to(DEVICE) for key, value in held.items()}
    weight = PackedWeight(packed_weights.CCQ, rows, count, tensors)
    slabs = quant_weights.prepare(weight).slabs
    assert slabs is not None
    own = quant_weights.dequantized(slabs, torch.float32).double().cpu().numpy()
    assert np.allclose(own, dense, rtol=1e-6)
    check(unpack(slabs, dtype), torch.from_numpy(dense).to(DEVICE), dtype)
    shapes: list[tuple[Few | Tile, int]] = [
        (Few(1, 2, 2, 2, 1), 3), (Few(2, 1, 2, 2, 1), 11),
        (Tile(64, 64, 1, 4, 4, 2, 1), 35), (Tile(16, 64, 2, 4, 8, 4, 1), 11),
    ]  # fmt: skip
    for shape, tokens in shapes:
        x = torch.randn(tokens, count, device=DEVICE).to(dtype)
        expected = x.double() @ torch.from_numpy(dense).to(DEVICE).T
        check(product(shape, x, slabs, None), expected, dtype)


@pytest.mark.parametrize("room", [quant_linear, quant_experts])
def test_one_kernel_serves_all_rows_where_they_may_not_depend_on_the_batch(
    room: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "batch_invariant", lambda: True)
    none = torch.empty(0)
    for kind in range(6):
        slabs = Slabs(kind, 8192, 4096, 8, none, none, None, 0)
        chosen = {room.choose(slabs, rows) for rows in (1, 8, 9, 20, 40, 100, 300, 5000)}
        assert len(chosen) == 1
        # quant_tile.cu reads nothing that lies row by row.
        assert kind in (INT4, INT8, FP8) or not isinstance(chosen.pop(), Tile)


@pytest.mark.parametrize("room", [quant_linear, quant_experts])
def test_chosen_kernels_fit_into_shared_memory(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_linear, "num_processors", lambda: 132)
    none, most = torch.empty(0), MOST_SHARED
    paired = room is quant_experts
    for kind in range(6):
        for width, depth in ((8192, 8192), (8192, 3584), (6144, 1024), (1024, 3072), (256, 128)):
            slabs = Slabs(kind, width, depth, 8, none, none, none.reshape(0, 1, 0, 0), 64)
            for rows in range(1, 1100):
                shape = room.choose(slabs, rows)
                if isinstance(shape, Few):
                    held = 2 if paired else shape.slabs
                    shared = few_shared(shape, held, kind, slabs.scaled)
                    assert shared <= most
                    assert paired or rows <= shape.rows  # a block has all rows
                elif isinstance(shape, Tile):
                    assert tile_shared(shape, kind, slabs.scaled) <= most
                    assert shape.teams <= shape.stages
                elif isinstance(shape, Persistent):
                    by_block = kind == FP8_ROWS
                    assert persistent_shared(shape, kind, by_block=by_block) <= MOST_DYNAMIC
                elif isinstance(shape, Grouped):
                    assert grouped_shared(shape, kind, is_int8=False) <= 227 << 10


@pytest.mark.parametrize("is_alone", [False, True])
def test_experts_pair_gate_and_up(is_alone: bool) -> None:
    experts, inner, hidden = 3, 32, 128
    parts = [packed("wint4", 2 * inner, hidden) for e in range(experts)]
    held = {
        key: torch.stack(
            [p.tensors[key] * (1 if key == "weight" else e + 1) for e, p in enumerate(parts)]
        )
        for key in ("weight", "scale")
    }
    weight = PackedWeight(FORMATS["wint4"], 2 * inner, hidden, held, experts)
    slabs = quant_weights.prepare(weight).slabs
    assert slabs is not None
    x = torch.randn(2, hidden, device=DEVICE).bfloat16()
    ids = torch.tensor([[2, 0], [1, 2]], device=DEVICE)
    if is_alone:
        grouping = Grouping(4, 2, ids=ids)
    else:
        slots = torch.full((3, 8), 4, dtype=torch.int32, device=DEVICE)
        slots[0, 0], slots[1, 0], slots[2, :2] = 1, 2, torch.tensor([0, 3])
        blocks = torch.arange(3, dtype=torch.int32, device=DEVICE)
        grouping = Grouping(4, 2, Order(slots.view(-1), blocks))
    got = product(Few(1, 2, 2, 2, 1), x, slabs, None, grouping=grouping, paired=True)
    wide = weight.dequantize().double()
    for slot in range(4):
        y = x[slot // 2].double() @ wide[int(ids.view(-1)[slot])].T
        expected = torch.nn.functional.silu(y[:inner]) * y[inner:]
        check(got[slot], expected, torch.bfloat16)


@pytest.mark.parametrize("name", ["wint4", "wint8", "wint4_zp"])
def test_weights_come_back(name: str) -> None:
    weight = packed(name, 40, 520, 0)
    slabs = quant_weights.prepare(weight).slabs
    assert slabs is not None
    check(unpack(slabs, torch.bfloat16), weight.dequantize().double(), torch.bfloat16)
    if name == "wint4":
        numbers = unpack(slabs, torch.int8).double() * slabs.scales[:40, None].double()
        check(numbers, weight.dequantize().double(), torch.float16)
