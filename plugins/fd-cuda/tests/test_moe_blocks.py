"""Whole blocks of experts through the driver, and the kernels for many rows, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastdeploy_core.contracts.moe import DividedMoEBackend, MoEBlockBackend, MoESpec, RoutingSpec
from moe_reference import reference

from fd_cuda import moe
from fd_cuda.kernels import experts, many_rows, routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
HIDDEN, WIDTH = 64, 32


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double().cpu() - wanted.cpu()).norm() / wanted.norm())


def noise(*shape: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape) * size).to(dtype).to(DEVICE)


@pytest.mark.parametrize("tokens", [0, 1, 5, 20, 70])
@pytest.mark.parametrize(("shared", "dtype"), [(0, torch.bfloat16), (2, torch.float32)])
def test_a_block(
    tokens: int, shared: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores in parts from 33 tokens on, shared experts apart from 50 on."""
    monkeypatch.setattr(moe, "_MANY_TOKENS", 50)
    torch.manual_seed(tokens)
    routing_spec = RoutingSpec(12, 3, has_correction_bias=True)
    name = str(dtype).removeprefix("torch.")
    spec = MoESpec(routing_spec, HIDDEN, WIDTH, name, num_shared_experts=shared)
    backend = moe.CudaMoE(spec, None, {})  # type: ignore[arg-type]
    assert isinstance(backend, MoEBlockBackend)
    x, gain = noise(tokens, HIDDEN, dtype=dtype), noise(HIDDEN, dtype=dtype)
    # Nearly even scores could be ordered otherwise in another precision.
    router, bias = noise(12, HIDDEN, size=2.0), noise(12, size=0.01)
    gate_up = noise(12 + shared, 2 * WIDTH, HIDDEN, size=0.2, dtype=dtype)
    down = noise(12 + shared, HIDDEN, WIDTH, size=0.2, dtype=dtype)
    wanted = reference(x, gain, router, bias, routing_spec, gate_up, down)
    weights = backend.prepare_weights(gate_up, down)
    got = backend.forward_block(x.clone(), gain, 1e-5, router, bias, weights)
    assert got.shape == x.shape
    if tokens:
        assert error_of(got, wanted) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_many_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens, top_k, count, width, depth = 150, 2, 3, 128, 256
    x = noise(tokens, depth, dtype=dtype)
    gate_up = noise(count, 2 * width, depth, size=0.1, dtype=dtype)
    down = noise(count, depth, width, size=0.1, dtype=dtype)
    assert many_rows.can_compute(x, gate_up, down)
    # Of last blocks with 2, 65 and 105 rows the first alone computes half of them.
    ids = torch.arange(count).repeat_interleave(torch.tensor([130, 65, 105]))
    ids = ids[torch.randperm(len(ids))].view(tokens, top_k).to(DEVICE)
    order = routing._counted_order(ids, count, many_rows.ROWS, 5)
    hidden = many_rows.gated(x, gate_up, order, ids.numel(), top_k)
    got = many_rows.plain(hidden, down, order, ids.numel())
    wanted = torch.empty(tokens * top_k, depth, dtype=torch.float64)
    for slot, expert in enumerate(ids.view(-1).tolist()):
        gate, up = (gate_up[expert].double() @ x[slot // top_k].double()).chunk(2)
        inner = torch.nn.functional.silu(gate) * up
        wanted[slot] = (down[expert].double() @ inner).cpu()
    assert error_of(got, wanted) < TOLERANCE[dtype]
    gate, up = (x.double() @ gate_up[0].double().T).chunk(2, -1)
    dense = many_rows.dense_gated(x, gate_up[0])
    assert error_of(dense, torch.nn.functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("few", [0, 8192])
@pytest.mark.parametrize(
    ("num_slots", "count", "rows"),
    [(4100, 66, 128), (700, 5, 16), (3, 8, 64), (500, 5, 80), (300, 130, 16)],
)
def test_an_order_has_every_slot_once(
    num_slots: int, count: int, rows: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "_FEW_SLOTS", few)
    ids = torch.randint(0, count, (num_slots, 1), device=DEVICE)
    ids[ids == 1] = 0  # an expert without tokens
    ids[::7] = -1  # of another rank
    blocks = min(num_slots, count) + max(0, num_slots - count) // rows
    order = routing.order_by_expert(ids, count, rows)
    slots = order.slots.view(blocks, rows).cpu()
    seen = slots[order.experts.cpu() >= 0].flatten()
    wanted = torch.nonzero(ids.cpu().view(-1) >= 0)[:, 0]
    assert sorted(seen[seen < num_slots].tolist()) == wanted.tolist()
    assert order.places is not None
    places = order.places.cpu()
    assert torch.equal(slots.flatten()[places[wanted]], wanted.int())
    assert (places[ids.cpu().view(-1) < 0] == -1).all()
    for block, expert in enumerate(order.experts.tolist()):
        own: Any = slots[block][slots[block] < num_slots]
        assert expert < 0 or set(ids.cpu()[own, 0].tolist()) == {expert}
    if few or count <= 128:
        counts = torch.bincount(ids.cpu()[wanted, 0], minlength=count)
        there = order.experts.cpu()
        held = counts[there[there >= 0]]
        assert (held[:-1] >= held[1:]).all(), "an expert with more rows stands behind another"


def test_large_batches_take_the_kernels_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever tiles the number of rows asks for, results agree."""
    torch.manual_seed(1)
    dtype = torch.bfloat16
    x, ids = noise(40, 256, dtype=dtype), torch.randint(0, 2, (40, 2), device=DEVICE)
    weights = torch.rand(40, 2, device=DEVICE)
    gate_up = noise(2, 256, 256, size=0.1, dtype=dtype)
    down = noise(2, 256, 128, size=0.1, dtype=dtype)
    small = experts.moe_experts(x, ids, weights, gate_up, down)
    monkeypatch.setattr(experts, "tiles_for", lambda *_: experts._MANY_ROWS)
    large = experts.moe_experts(x, ids, weights, gate_up, down)
    assert error_of(large, small.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(1, torch.bfloat16), (2, torch.float32), (20, torch.bfloat16), (70, torch.float32)],
)
def test_shares_of_the_experts_add_up(
    tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two halves of the experts make what all of them make, although memory that is never written
    holds NaN."""
    torch.manual_seed(tokens)
    spec = RoutingSpec(8, 3)
    name = str(dtype).removeprefix("torch.")
    x, logits = noise(tokens, HIDDEN, dtype=dtype), noise(tokens, 8, size=2.0)
    gate_up = noise(8, 2 * WIDTH, HIDDEN, size=0.2, dtype=dtype)
    down = noise(8, HIDDEN, WIDTH, size=0.2, dtype=dtype)
    ids, weights = routing.route(logits, None, spec, 0)
    wanted = experts.moe_experts(x.double().float(), ids, weights, gate_up.float(), down.float())
    half = moe.CudaMoE(MoESpec(RoutingSpec(4, 3), HIDDEN, WIDTH, name), None, {})  # type: ignore[arg-type]
    assert isinstance(half, DividedMoEBackend)
    total, empty = torch.zeros_like(wanted), torch.empty

    def filled(*shape: Any, **more: Any) -> torch.Tensor:
        made = empty(*shape, **more)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)
    for first in (0, 4):
        own = half.prepare_weights(gate_up[first : first + 4], down[first : first + 4])
        part = half.forward_share(x, own, logits, None, spec, first)
        total += part.float()
        here = (ids >= first) & (ids < first + 4)
        given = half.forward_routed(x, own, torch.where(here, ids - first, -1), weights)
        assert error_of(given, part.double().cpu()) < 1e-6 or not here.any()
    assert error_of(total, wanted.double().cpu()) < 2 * TOLERANCE[dtype]
