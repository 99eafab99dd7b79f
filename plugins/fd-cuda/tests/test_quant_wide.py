"""quant_tile.cu against dequantization in float64: emulated, clusters and copies included, or on
the GPU."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight
from quant_emulation import use_kernels
from test_quant_native import DEVICE, HAS_GPU, Case, check, check_product, packed

from fd_cuda.kernels import quant_weights
from fd_cuda.kernels.quant_native import Grouping, product
from fd_cuda.kernels.quant_order import gathered
from fd_cuda.kernels.quant_shapes import Tile, tile_room, tile_shared
from fd_cuda.kernels.routing import Order

pytestmark = pytest.mark.skipif(not HAS_GPU and shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(autouse=True)
def kernels(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(tmp_path_factory.getbasetemp(), monkeypatch)


# Parts of K that are empty, blocks after the end, fewer turns than tiles and more.
CASES: list[Case] = [
    ("wint4", 600, 200, 0, torch.bfloat16, 70, Tile(64, 64, 1, 2, 4, 2, 2)),
    ("wint8", 144, 712, 0, torch.bfloat16, 70, Tile(64, 128, 1, 4, 8, 4, 1)),
    ("wint4_zp", 80, 384, 128, torch.float16, 15, Tile(64, 64, 2, 4, 4, 1, 2)),
    ("wint8_zp", 400, 448, 64, torch.bfloat16, 70, Tile(128, 192, 4, 3, 4, 1, 2)),
    ("wint8", 80, 200, 0, torch.float16, 90, Tile(64, 64, 2, 3, 4, 1, 2, 2)),
]
LARGE: list[Case] = [
    ("wint4", 264, 520, 0, torch.bfloat16, 300, Tile(128, 256, 1, 4, 4, 2, 1)),
    ("wint4", 1032, 1024, 128, torch.bfloat16, 130, Tile(64, 256, 4, 4, 8, 4, 1)),
    ("wint8", 520, 1088, 64, torch.float16, 130, Tile(128, 128, 8, 4, 8, 2, 2)),
    ("wfp8", 6144, 1024, 0, torch.bfloat16, 700, Tile(128, 192, 1, 4, 4, 1, 2)),
    ("wint8", 5200, 1024, 0, torch.bfloat16, 200, Tile(64, 128, 2, 4, 8, 2, 2)),
    ("wint4", 264, 520, 0, torch.bfloat16, 300, Tile(160, 128, 1, 4, 4, 2, 1)),
]


def test_blocks_have_the_shared_memory_that_tiles_take() -> None:
    for name, rows, count, group, _, _, shape in (*CASES, *LARGE):
        slabs = quant_weights.prepare(packed(name, rows, count, group)).slabs
        if isinstance(shape, Tile) and slabs is not None:
            assert tile_shared(shape, slabs.kind, slabs.scaled) <= tile_room(shape), (name, shape)


def test_stages_of_a_tile_have_one_team_each() -> None:
    with pytest.raises(ValueError, match="5 stages are not divisible among 2 teams"):
        Tile(64, 128, 1, 5, 8, 2, 1)


@pytest.mark.parametrize("case", [*CASES, *(LARGE if HAS_GPU else [])], ids=str)
def test_product(case: Case) -> None:
    for _ in range(20 if HAS_GPU else 1):
        check_product(case)


@pytest.mark.parametrize("name", ["wint4", "wint8"])
def test_experts_pair_gate_and_up(name: str) -> None:
    """Rows gathered by expert, two blocks of one of them, and an unused block."""
    experts, inner, hidden, tokens = 2, 48, 136, 12
    parts = [packed(name, 2 * inner, hidden + e) for e in range(experts)]
    held = {
        "weight": torch.stack(
            [p.tensors["weight"][:, : parts[0].tensors["weight"].shape[1]] for p in parts]
        ),
        "scale": torch.stack([p.tensors["scale"] for p in parts]),
    }
    weight = PackedWeight(FORMATS[name], 2 * inner, hidden, held, experts)
    slabs = quant_weights.prepare(weight).slabs
    assert slabs is not None
    shape = Tile(16, 128, 1, 4, 4, 2, 2)
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    ids = torch.tensor([[0, 1]] + [[1, 1]] * (tokens - 1), device=DEVICE)
    slots, block = 2 * tokens, shape.rows
    own = [torch.nonzero(ids.view(-1) == e)[:, 0] for e in range(experts)]
    rows = torch.full((4, block), slots, dtype=torch.int32, device=DEVICE)
    rows[0, :1], rows[1], rows[3, : len(own[1]) - block] = own[0], own[1][:block], own[1][block:]
    order = Order(rows.view(-1), torch.tensor([0, 1, -1, 1], dtype=torch.int32, device=DEVICE))
    grouping = Grouping(slots, 1, order)
    ordered = gathered(x, order, slots, 2)
    got = product(shape, ordered, slabs, None, grouping=grouping, paired=True)
    plain = product(shape, ordered, slabs, None, grouping=grouping)
    wide = quant_weights.dequantized(slabs, torch.float32).double()
    for place, slot in enumerate(rows.view(-1).tolist()):
        if slot == slots:
            continue
        y = x[slot // 2].double() @ wide[int(ids.view(-1)[slot])].T
        check(got[place], torch.nn.functional.silu(y[:inner]) * y[inner:], torch.bfloat16)
        check(plain[slot], y, torch.bfloat16)
