"""Experts with packed weights, `moe_experts_<format>`: two grouped products and the weighted sum.

The native kernels of quant_native.py pair gate and up. What they cannot read is quant_any.py's.
Where they cannot run what they read (float32, odd sizes) all experts are dequantized for the call.
"""

from __future__ import annotations

from math import ceil, erfc
from typing import Final

import torch

from . import quant_any, quant_blocks
from .common import batch_invariant
from .experts import combined, grouped
from .experts import moe_experts as experts_in_halves
from .experts import tiles_for as tiles_of_experts
from .norm import silu_and_mul
from .quant_grouped import grouped_shape
from .quant_layout import CCQ, INT4, Slabs
from .quant_linear import TILE_ENDS, multiply, native_runs, with_copies
from .quant_native import Grouping, as_numbers, unpack
from .quant_order import gathered
from .quant_round import FP8_BLOCK
from .quant_shapes import (
    Blocks,
    Few,
    Grouped,
    Persistent,
    Tile,
    blocks,
    persistent,
)
from .quant_weights import Weights
from .routing import Order, order_by_expert

# Up to so many tokens every assignment is a block of its own.
_ALONE: Final = 2
# Outputs of a first product up to which the second one has so few turns that many blocks have to be
# resident; measured with 512 experts of 2048 x 512 and scales of blocks.
_SMALL: Final = 1024
# Rows an expert from which CCQ is unpacked for the call, and numbers that are unpacked at most.
_MANY_CODES: Final = 192
# Rows an expert from which quant_persistent.cu is faster, and rows of its blocks.
_MANY_EACH: Final = 80
# Rows an expert up to which blocks of quant_grouped.cu have 32, and from which they have 128.
_FEW_EACH: Final = 28
_SOME_EACH: Final = 48
# Sixteens of outputs of all experts from which tiles of 32 of them keep the GPU busy.
_MANY_SLABS: Final = 1 << 13
_PERSISTENT_ROWS: Final = (128, 160, 192, 208)
# Rows an expert from which int4 with rounded activations is unpacked to int8.
_MANY_NUMBERS: Final = 256
_MOST_UNPACKED: Final = 1 << 30


def moe_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: Weights,
    down: Weights,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' gated MLPs: x [T, H], gate_up [E, 2I, H], down [E, H,
    I]."""
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    tokens, top_k = topk_ids.shape
    if not tokens:
        return torch.empty_like(x)
    x = x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    first, second = gate_up.slabs, down.slabs
    if first is None or second is None:
        return _in_triton(x, topk_ids, topk_weights, gate_up, down)
    # Sixteens of gates and of what belongs to them, or tiles of 64 that have a scale each.
    whole = 32 if first.block_scales is None else FP8_BLOCK
    is_odd = first.out_features % whole or (gate_up.rounding and first.in_features % 16)
    if not native_runs(x) or is_odd:
        return _dequantized(x, topk_ids, topk_weights, gate_up, down)
    each = tokens * top_k / first.num_experts
    shape = choose(first, each, rounds=bool(gate_up.rounding))
    sizes = [(s.num_experts, s.out_features, s.in_features) for s in (first, second)]
    if not batch_invariant() and may_unpack(*sizes):
        if first.kind == CCQ and each > _MANY_CODES:
            wide = [unpack(slabs, x.dtype) for slabs in (first, second)]
            return experts_in_halves(x, topk_ids, topk_weights, *wide)
        of_numbers = first.kind == INT4 and gate_up.rounding == "int8"
        if of_numbers and each > _MANY_NUMBERS and first.in_features % 16 == 0:
            first, second = as_numbers(first), as_numbers(second)
            shape = choose(first, each)
    if isinstance(shape, Few):
        y = _of_few_rows(shape, x, topk_ids, (gate_up, first), (down, second))
        return combined(y, topk_weights)
    slots, order = tokens * top_k, order_by_expert(topk_ids, first.num_experts, shape.rows)
    y = in_blocks(shape, x, order, slots, top_k, (gate_up, first), (down, second))
    return combined(y, topk_weights)


def _of_few_rows(
    shape: Few,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: tuple[Weights, Slabs],
    down: tuple[Weights, Slabs],
) -> torch.Tensor:
    """[slots, H]: the gated MLPs of the chosen experts, whose rows are read where they are."""
    slots, (tokens, top_k) = topk_ids.numel(), topk_ids.shape
    ids = topk_ids if tokens <= _ALONE else None
    count = gate_up[1].num_experts
    order = order_by_expert(topk_ids, count, shape.rows) if ids is None else None
    y = x
    for (weight, slabs), divisor, paired in ((gate_up, top_k, True), (down, 1, False)):
        seen, scales = weight.round(y)
        own = Grouping(slots, divisor, order, ids)
        y = multiply(shape, seen, scales, slabs, None, x.dtype, grouping=own, paired=paired)
    return y


def in_blocks(
    shape: Tile | Persistent | Blocks | Grouped,
    x: torch.Tensor,
    order: Order,
    slots: int,
    top_k: int,
    gate_up: tuple[Weights, Slabs],
    down: tuple[Weights, Slabs],
) -> torch.Tensor:
    """[slots, H]: the gated MLPs of the experts that rows slot // top_k of x go to in this order,
    in which a kernel puts them."""
    by_words, (weight, first), (other, second) = isinstance(shape, Grouped), gate_up, down
    scales, own = None, Grouping(slots, 1, order)
    if weight.rounding:
        rows, scales = weight.numbers(x, into=order, by_words=by_words)
    else:
        rows = gathered(x, order, slots, top_k)
    if isinstance(shape, Blocks) and scales is not None:
        hidden, scales = quant_blocks.gated_product(rows, scales, first, own, x.dtype)
    else:
        hidden = multiply(shape, rows, scales, first, None, x.dtype, grouping=own, paired=True)
        if other.rounding:
            hidden, scales = other.numbers(hidden, order, by_words=by_words)
    return multiply(shape, hidden, scales, second, None, x.dtype, grouping=own)


def choose(
    slabs: Slabs, each: float, *, rounds: bool = False
) -> Few | Tile | Persistent | Blocks | Grouped:
    """The kernel for so many rows an expert, by what was measured on an H200 with 64 experts of
    2560 x 1536: between points of those tables a choice is a guess. `rounds`: of int4, whether
    activations are rounded."""
    by_rows = slabs.lies_by_rows
    if batch_invariant():
        if slabs.kind == CCQ:
            return Few(4, 2, 8, 4, 1)
        if by_rows:
            return persistent(32, slabs.kind)
        return grouped_shape(slabs.kind, rounds=rounds)
    by_block = slabs.block_scales is not None
    # What two products of the matrix units make of gates and what belongs to them is rounded as one
    # block.
    if by_block and each > _FEW_EACH and slabs.out_features % (2 * FP8_BLOCK) == 0:
        return blocks()
    if rounds and slabs.kind == INT4 and each > _SOME_EACH:
        return grouped_shape(INT4, 128, rounds=True)
    if each > _MANY_EACH and slabs.kind != CCQ and not by_block:
        return persistent(persistent_rows(each), slabs.kind)
    few = 8 if slabs.scaled else 3 if slabs.kind == INT4 else 4
    if by_rows:
        few = 2 if by_block and slabs.out_features <= _SMALL else 4
    if each <= (16 if slabs.kind == CCQ else few):
        return Few(1, 2, 4, 3, 5) if each <= 8 else Few(2, 2, 4, 3, 4)
    if slabs.kind == CCQ:
        return grouped_tile(32 if each <= 28 else 64 if each <= 60 else 128)
    if by_rows:
        return persistent(32 if each <= _FEW_EACH else 64 if each <= 64 else 128, slabs.kind)
    is_plain = slabs.kind == INT4 and not slabs.scaled and not rounds
    if is_plain and each <= _FEW_EACH and slabs.num_experts * slabs.num_slabs >= _MANY_SLABS:
        return grouped_shape(INT4, 32)
    rows = 128 if slabs.kind == INT4 and each > _SOME_EACH else 64
    return grouped_shape(slabs.kind, rows, rounds=rounds)


def persistent_rows(each: float) -> int:
    """Of a block, so that what blocks compute and cost besides is least."""
    return min(_PERSISTENT_ROWS, key=lambda rows: blocks_of(each, rows) * (rows + TILE_ENDS))


def blocks_of(each: float, rows: int) -> float:
    """How many an expert has where tokens choose at random: the chances that it has a first, a
    second, ..."""
    last = ceil((each + 6 * each**0.5) / rows)
    return sum(0.5 * erfc((n * rows + 0.5 - each) / (2 * each) ** 0.5) for n in range(last))


def grouped_tile(rows: int) -> Tile:
    """quant_tile.cu for experts in CCQ. Two blocks of few rows share a multiprocessor: one
    multiplies while the other one begins or ends."""
    return with_copies(Tile(rows, 128, 1, 4, 8, 4, 1, 2 if rows <= 64 else 1), CCQ, 0)


def may_unpack(*shapes: tuple[int, int, int]) -> bool:
    """Whether all experts (their number, outputs, inputs) in half floats, for one call, fit beside
    what else is in memory."""
    numbers = sum(count * rows * width for count, rows, width in shapes)
    return numbers <= _MOST_UNPACKED and all(rows % 16 == 0 for _, rows, _ in shapes)


def _in_triton(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: Weights,
    down: Weights,
) -> torch.Tensor:
    """Where the native kernels read not both: by quant_any.py, or dequantized."""
    if gate_up.packed is None or down.packed is None:
        return _dequantized(x, topk_ids, topk_weights, gate_up, down)
    slots, top_k = topk_ids.numel(), topk_ids.shape[1]
    tiles = quant_any.tiles_for(slots / gate_up.packed.num_experts, x.dtype)
    order = order_by_expert(topk_ids, gate_up.packed.num_experts, tiles.rows)
    y = quant_any.grouped(gate_up.seen(x), gate_up.packed, order, tiles, slots, top_k)
    hidden = down.seen(silu_and_mul(y))
    return combined(quant_any.grouped(hidden, down.packed, order, tiles, slots, 1), topk_weights)


def _dequantized(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: Weights,
    down: Weights,
) -> torch.Tensor:
    """All experts dequantized for the call by plain tensor code, for the products of experts.py.
    Nothing waits for the host."""
    slots, top_k = topk_ids.numel(), topk_ids.shape[1]
    first, second = (weight.dequantized(x.dtype) for weight in (gate_up, down))
    tiles = tiles_of_experts(topk_ids.shape[0], top_k, first.shape[0], x.dtype)
    order = order_by_expert(topk_ids, first.shape[0], tiles.rows)
    hidden = grouped(gate_up.seen(x), first, order, tiles, slots, top_k, gated=True)
    y = grouped(down.seen(hidden), second, order, tiles, slots, 1, gated=False)
    return combined(y, topk_weights)
