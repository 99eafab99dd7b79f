"""Experts with packed weights and few rows each, by quant_grouped.cu."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import native
from .common import num_processors
from .native import tensor_map
from .quant_layout import TURN, Slabs
from .quant_order import gathered
from .quant_shapes import Grouped, grouped_shared, slab_bytes

if TYPE_CHECKING:
    from .quant_weights import Weights
    from .routing import Order

_EIGHT = 8  # rows of x that one copy brings


def grouped_product(
    shape: Grouped,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: Slabs,
    dtype: torch.dtype,
    order: Order,
    num_slots: int,
    *,
    paired: bool,
) -> torch.Tensor:
    """Rows of x, half floats or int8 numbers by words, in the order of the blocks, times the
    weight of the block's expert. What comes out lies like x where it is `paired`, else by slots."""
    blocks, width = len(order.experts), weight.out_features // (1 + paired)
    num_rows = blocks * shape.rows if paired else num_slots
    y = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    across = -(-width // (shape.slabs * 16 // (1 + paired)))
    size, is_int8 = slab_bytes(weight.kind), x.dtype == torch.int8
    defines = {
        "HALF": int(x.dtype == torch.float16),
        "Y_HALF": int(dtype == torch.float16),
        "FORMAT": weight.kind,
        "SCALED": weight.scaled,
        "NUMBERS": int(is_int8),
        "PAIRED": int(paired),
        "GROUPED": 1,
        "BN": shape.rows,
        "GROUPS": shape.groups,
        "STAGES": shape.stages,
        "THREADS": shape.threads,
    }
    arguments = [
        tensor_map.boxes(x, _EIGHT),
        tensor_map.slab_boxes(
            weight.data.view(-1, weight.num_turns * size), 2 * size, shape.slabs // 2
        ),
        weight.table(x.dtype),
        weight.scales,
        x_scales,
        y,
        order.slots,
        order.experts,
        num_slots,
        weight.out_features,
        weight.num_slabs,
        weight.num_turns,
        weight.group_size // TURN if weight.group_size else weight.num_turns,
        weight.scales[0].numel(),
        blocks,
        across,
    ]
    native.launch(
        native.function("quant_grouped", defines), (min(blocks * across, num_processors()), 1, 1),
        shape.threads, arguments, shared=grouped_shared(shape, weight.kind, is_int8=is_int8),
    )  # fmt: skip
    return y


def experts(
    shape: Grouped,
    x: torch.Tensor,
    order: Order,
    num_slots: int,
    top_k: int,
    gate_up: tuple[Weights, Slabs],
    down: tuple[Weights, Slabs],
) -> torch.Tensor:
    """[num_slots, H]: the gated MLPs of the experts that rows slot // top_k of x go to in this
    order."""
    (weight, first), (other, second) = gate_up, down
    scales = None
    if weight.rounding:
        given, scales = weight.numbers(x, into=order, by_words=True)
    else:
        given = gathered(x, order, num_slots, top_k)
    hidden = grouped_product(shape, given, scales, first, x.dtype, order, num_slots, paired=True)
    if other.rounding:
        hidden, scales = other.numbers(hidden, order, by_words=True)
    return grouped_product(shape, hidden, scales, second, x.dtype, order, num_slots, paired=False)
