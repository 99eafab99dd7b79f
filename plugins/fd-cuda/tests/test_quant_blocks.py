"""quant_blocks.cu against dequantization in float64: emulated, the copy engine included, or on the
GPU."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from packed_weights import packed as packed_on
from quant_emulation import use_kernels
from test_quant_native import DEVICE, HAS_GPU, check

from fd_cuda.kernels import quant_blocks, quant_experts, quant_linear, quant_weights
from fd_cuda.kernels.experts import combined
from fd_cuda.kernels.quant_layout import FP8_ROWS
from fd_cuda.kernels.quant_native import Grouping
from fd_cuda.kernels.quant_round import fp8_blocks
from fd_cuda.kernels.quant_shapes import MOST_DYNAMIC, Blocks, blocks, blocks_shared
from fd_cuda.kernels.routing import order_by_expert

pytestmark = pytest.mark.skipif(not HAS_GPU and shutil.which("g++") is None, reason="needs g++")
# Outputs, inputs, dtype, rows of x.
Case = tuple[int, int, torch.dtype, int]
# Rows of 261 numbers are none that the copy engine stores; 128 inputs are a single turn.
SMALL: list[Case] = [(264, 272, torch.bfloat16, 140), (261, 128, torch.float16, 140)]
LARGE: list[Case] = [(3080, 1040, torch.bfloat16, 1500), (8192, 4096, torch.float16, 777)]


@pytest.fixture(autouse=True)
def kernels(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(tmp_path_factory.getbasetemp(), monkeypatch)
    if not HAS_GPU:
        monkeypatch.setattr(quant_blocks, "num_processors", lambda: 2)  # fewer than tiles


def made(
    rows: int, count: int, experts: int = 0
) -> tuple[quant_weights.Weights, quant_weights.Slabs]:
    torch.manual_seed(rows + count)
    weight = quant_weights.prepare(packed_on("block_fp8", rows, count, 0, experts, DEVICE))
    assert weight.slabs is not None
    return weight, weight.slabs


@pytest.mark.parametrize(("columns", "split"), [(128, 1), (256, 1), (128, 2), (128, 4)])
def test_blocks_have_the_shared_memory_that_turns_take(columns: int, split: int) -> None:
    shape = blocks(columns, split)
    assert shape.stages >= 4
    assert blocks_shared(shape) <= MOST_DYNAMIC


@pytest.mark.parametrize(
    ("width", "depth", "rows", "tile"),
    [
        (6144, 1024, 64, None),
        (6144, 1024, 128, None),  # smaller tiles, by quant_persistent.cu
        (6144, 1024, 256, (128, 1)),
        (6144, 1024, 512, (256, 1)),  # one round of wide tiles
        (6144, 1024, 1024, (128, 1)),  # 3 rounds of tiles; of 256 outputs, 2
        (6144, 1024, 4096, (256, 1)),
        (1024, 3072, 128, None),
        (1024, 3072, 256, None),
        (1024, 3072, 1024, (128, 2)),
        (2048, 8192, 512, (128, 2)),
        (1024, 3072, 4096, (256, 1)),
        (8192, 8192, 128, (128, 2)),
        (8192, 8192, 256, None),
        (8200, 8192, 256, (128, 1)),  # cuBLAS takes whole blocks only
        (6144, 1040, 4096, (256, 1)),
    ],
)
def test_tiles_are_chosen_that_are_done_first(
    width: int,
    depth: int,
    rows: int,
    tile: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quant_linear, "num_processors", lambda: 132)
    none = torch.empty(0)
    scales = none.reshape(0, 0)
    slabs = quant_weights.Slabs(FP8_ROWS, width, depth, 0, none, none, None, 128, scales)
    chosen = quant_linear.choose(slabs, rows, rounds=True)
    assert ((chosen.columns, chosen.split) if isinstance(chosen, Blocks) else None) == tile


@pytest.mark.parametrize("shape", [blocks(), blocks(256), blocks(split=2)], ids=str)
@pytest.mark.parametrize("case", [*SMALL, *(LARGE if HAS_GPU else [])], ids=str)
def test_product(case: Case, shape: Blocks) -> None:
    if case[1] < 128 * shape.split:
        pytest.skip("a turn for every block")
    compare(case, shape)


@pytest.mark.parametrize(
    "case", [(136, 1168, torch.bfloat16, 70), (261, 656, torch.float16, 140)], ids=str
)
def test_product_whose_inputs_four_blocks_divide(case: Case) -> None:
    compare(case, blocks(split=4))


def compare(case: Case, shape: Blocks) -> None:
    rows, count, dtype, tokens = case
    weight, slabs = made(rows, count)
    x, bias = (torch.randn(*size, device=DEVICE).to(dtype) for size in ((tokens, count), (rows,)))
    expected = weight.seen(x.float()).double() @ weight.dequantized(torch.float32).double().T
    for _ in range(20 if HAS_GPU else 1):
        got = quant_blocks.product(shape, *fp8_blocks(x), slabs, bias, dtype)
        check(got, expected + bias.double(), dtype)


@pytest.mark.parametrize("tokens", [70, 2000] if HAS_GPU else [70])
def test_layer_of_experts(tokens: int) -> None:
    """Rows gathered by expert, groups of warps that have none, unused blocks: what lies between the
    products is rounded as a kernel of its own would."""
    experts, inner, hidden, shape = 3, 256, 256, blocks()
    (gate_up, first), (down, second) = (
        made(2 * inner, hidden, experts),
        made(hidden, inner, experts),
    )
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)]).to(DEVICE)
    ids[:, 1] = torch.where(ids[:, 0] == 0, 1, 0)  # nearly all rows are of two experts
    order, slots = order_by_expert(ids, experts, shape.rows), 2 * tokens
    grouping = Grouping(slots, 1, order)
    numbers, scales = fp8_blocks(x, into=order)
    inside, of_inside = quant_blocks.gated_product(numbers, scales, first, grouping, x.dtype)
    both = (gate_up, first), (down, second)
    y = quant_experts.in_blocks(shape, x, order, slots, 2, *both)
    wide, narrow = (w.dequantized(torch.float32).double() for w in (gate_up, down))
    meant, experts_of = gate_up.seen(x.float()).double(), ids.view(-1).tolist()
    for place, slot in enumerate(order.slots.tolist()):
        if slot >= slots or order.experts[place // shape.rows] < 0:
            continue
        both = meant[slot // 2] @ wide[experts_of[slot]].T
        expected = torch.nn.functional.silu(both[:inner]) * both[inner:]
        own = inside[place].double().view(-1, 128) * of_inside[place].double()[:, None]
        steps = expected.view(-1, 128).abs().amax(1, keepdim=True) / 448
        # 16: half a step of the largest numbers; 1.75: half one of bfloat16's, which they were
        # rounded to before; the rest: of the product itself.
        assert ((own - expected.view(-1, 128)).abs() <= 20 * steps).all()
        check(y[slot], own.view(-1) @ narrow[experts_of[slot]].T, torch.bfloat16)
    shares = torch.rand(tokens, 2, device=DEVICE)
    assert combined(y, shares).isfinite().all()


def test_gated_numbers_are_those_of_the_rounding_kernel() -> None:
    """One expert, up to the product's own rounding."""
    inner, hidden, shape = 128, 128, blocks()
    _, slabs = made(2 * inner, hidden, 1)
    x = torch.randn(40, hidden, device=DEVICE).bfloat16()
    ids = torch.zeros(40, 1, dtype=torch.long, device=DEVICE)
    order = order_by_expert(ids, 1, shape.rows)
    grouping = Grouping(40, 1, order)
    numbers, scales = fp8_blocks(x, into=order)
    got, of_got = quant_blocks.gated_product(numbers, scales, slabs, grouping, x.dtype)
    plain = torch.empty(40, 2 * inner, dtype=torch.float32, device=DEVICE)
    plain[:] = (numbers[:40].float() * scales[:40].repeat_interleave(128, 1)) @ (
        quant_weights.dequantized(slabs, torch.float32)[0].T
    )
    gate, up = plain[:, :inner], plain[:, inner:]
    expected, of_expected = fp8_blocks((torch.nn.functional.silu(gate) * up).bfloat16())
    assert torch.allclose(of_got[:40], of_expected, rtol=1e-2)
    same = (got[:40].float() == expected.float()).float().mean()
    assert same > 0.9
