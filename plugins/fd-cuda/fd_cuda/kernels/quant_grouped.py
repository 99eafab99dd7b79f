"""Experts with packed weights and few rows each, by quant_grouped.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from . import native
from .common import num_processors
from .native import tensor_map
from .quant_layout import MXFP4, SLAB_ROWS, TURN, Slabs
from .quant_order import STEP, gathered
from .quant_shapes import MOST_DYNAMIC, Grouped, grouped_shared, slab_bytes

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight

    from .routing import Order

_EIGHT = 8  # rows of x that one copy brings


@dataclass(frozen=True, slots=True)
class Matrix:
    """Of every expert, as the kernel reads it."""

    kind: int
    scaled: int
    out_features: int
    turns: int
    boxes: bytes  # of numbers
    groups: torch.Tensor | None
    turns_of_group: int
    scales: torch.Tensor  # float32 [E, N or more]
    slab_rows: int = SLAB_ROWS
    is_in_turn: bool = False  # gates and what belongs to them
    bias: torch.Tensor | None = None


def of_slabs(shape: Grouped, weight: Slabs, dtype: torch.dtype) -> Matrix:
    """For activations in this dtype."""
    size, turns = slab_bytes(weight.kind), weight.num_turns
    boxes = tensor_map.slab_boxes(weight.data.view(-1, turns * size), 2 * size, shape.slabs // 2)
    each = weight.group_size // TURN if weight.group_size else turns
    return Matrix(
        weight.kind, weight.scaled, weight.out_features, turns, boxes, weight.table(dtype), each,
        weight.scales,
    )  # fmt: skip


def of_mxfp4(shape: Grouped, weight: PackedWeight, bias: torch.Tensor | None) -> Matrix:
    """Of a weight that prepare_mxfp4() has seen."""
    held, turns = weight.tensors, -(-weight.in_features // TURN)
    stored = held["weight"].view(torch.uint8).view(-1, weight.in_features // 2)
    boxes = tensor_map.slab_boxes(stored, STEP // 2, shape.slabs * SLAB_ROWS)
    powers, largest = held["powers"], held["largest"]
    return Matrix(
        MXFP4, 0, weight.out_features, turns, boxes, powers, turns, largest, is_in_turn=True,
        bias=bias,
    )  # fmt: skip


def prepare_mxfp4(weight: PackedWeight) -> PackedWeight:
    """With its scales once more: `largest` float32 [E, N] of an output, and relative to it, as the
    exponents of floats 2^126 as large, `powers` uint8 [E, steps, N, 4]."""
    scale = weight.tensors["scale"]
    largest = scale.amax(-1, keepdim=True)
    powers = (scale.int() + 253 - largest.int()).clamp_(0, 253).to(torch.uint8)
    powers = F.pad(powers, (0, -powers.shape[-1] % 4))
    powers = powers.unflatten(-1, (-1, 4)).transpose(1, 2).contiguous()
    more = {"powers": powers, "largest": torch.exp2(largest[..., 0].float() - 127.0)}
    return replace(weight, tensors={**weight.tensors, **more})


def grouped_product(
    shape: Grouped,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: Matrix,
    dtype: torch.dtype,
    order: Order,
    num_slots: int,
    *,
    paired: bool,
    x_sums: torch.Tensor | None = None,
    clamp: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:
    """Rows of x, half floats or int8 numbers by words, in the order of the blocks, times the
    weight of the block's expert. What comes out lies like x where it is `paired`, else by slots.
    MXFP4: inputs are by steps, and so are outputs of what is `paired`; `clamp`: alpha and limit."""
    blocks, width = len(order.experts), weight.out_features // (1 + paired)
    across = -(-width // (shape.slabs * SLAB_ROWS // (1 + paired)))
    num_rows = blocks * shape.rows if paired else num_slots
    held = across * STEP if paired and weight.is_in_turn else width
    y = torch.empty((num_rows, held), dtype=dtype, device=x.device)
    is_int8 = x.dtype == torch.int8
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
        "MT": shape.held,
        "STAGES": shape.stages,
        "THREADS": shape.threads,
    }
    arguments = [
        tensor_map.boxes(x, _EIGHT), weight.boxes, weight.groups, weight.scales, x_scales, x_sums,
        weight.bias, y, order.slots, order.experts, num_slots, weight.out_features,
        -(-weight.out_features // weight.slab_rows), weight.turns, weight.turns_of_group,
        weight.scales.shape[1], blocks, across, *clamp,
    ]  # fmt: skip
    native.launch(
        native.function("quant_grouped", defines), (min(blocks * across, num_processors()), 1, 1),
        shape.threads, arguments, shared=grouped_shared(shape, weight.kind, is_int8=is_int8),
    )  # fmt: skip
    return y


def clamped_experts(
    shape: Grouped,
    x: torch.Tensor,
    order: Order,
    num_slots: int,
    top_k: int,
    gate_up: tuple[PackedWeight, torch.Tensor],
    down: tuple[PackedWeight, torch.Tensor | None],
    clamp: tuple[float, float],
) -> torch.Tensor:
    """[num_slots, H]: the clamped MLPs of the experts that rows slot // top_k of x go to in this
    order, in MXFP4 and with biases."""
    first, second = (of_mxfp4(shape, *own) for own in (gate_up, down))
    given = gathered(x, order, num_slots, top_k, by_steps=True)
    hidden = grouped_product(
        shape, given, None, first, x.dtype, order, num_slots, paired=True, clamp=clamp
    )
    return grouped_product(shape, hidden, None, second, x.dtype, order, num_slots, paired=False)


def grouped_shape(kind: int, rows: int = 64, *, rounds: bool = False) -> Grouped:
    """With as many steps ahead, to eight, as there is shared memory for. `rounds`: activations are
    int8. Blocks of 32 rows leave registers for four slabs a warp: fewer tiles read each row. Those
    of MXFP4 are multiplied by mma.sync."""
    held = 4 if rows == 32 and kind != MXFP4 else 2
    shapes = (Grouped(rows, 2, stages, held) for stages in range(8, 2, -1))
    fits = (s for s in shapes if grouped_shared(s, kind, is_int8=rounds) <= MOST_DYNAMIC)
    return next(fits)
