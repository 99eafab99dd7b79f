"""Launches of the native kernels of packed weights: products with activations, and unpacking."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from . import native
from .native import tensor_map
from .quant_layout import CCQ, INT8_ROWS, TRELLIS, TURN, Slabs
from .quant_shapes import Few, Tile, few_shared, tile_shared

if TYPE_CHECKING:
    from .routing import Order


@dataclass(frozen=True, slots=True)
class Grouping:
    """Rows by expert: an Order of routing.py, or the ids themselves, one row a block."""

    num_slots: int
    divisor: int  # slots of a row of x
    order: Order | None = None
    ids: torch.Tensor | None = None

    @property
    def blocks(self) -> int:
        """Blocks of rows."""
        return self.num_slots if self.order is None else len(self.order.experts)


def product(
    shape: Few | Tile,
    x: torch.Tensor,
    weight: Slabs,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    x_scales: torch.Tensor | None = None,
    grouping: Grouping | None = None,
    paired: bool = False,
) -> torch.Tensor:
    """x [T, K] times the weight, in dtype or in x's own; rows of x are whole 16 bytes. Tile: rows
    of experts lie in the order of the blocks, in x and, where it is `paired`, in what comes out."""
    dtype = dtype or x.dtype
    is_ordered = isinstance(shape, Tile) and paired
    num_rows = x.shape[0] if grouping is None or is_ordered else grouping.num_slots
    width = weight.out_features // 2 if paired else weight.out_features
    y = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    defines = {
        "HALF": int(x.dtype == torch.float16),
        "Y_HALF": int(dtype == torch.float16),
        "FORMAT": weight.kind,
        "SCALED": weight.scaled,
        "PAIRED": int(paired),
        "GROUPED": int(grouping is not None),
        "EVEN": int(x.shape[1] % TURN == 0),
    }
    order = None if grouping is None else grouping.order
    operands: list[Any] = [
        weight.data,
        weight.table(x.dtype),
        weight.scales,
        x_scales,
        bias,
        y,
        None if order is None or is_ordered else order.slots,
        None if order is None else order.experts,
    ]
    sizes = [
        weight.num_slabs,
        weight.num_turns,
        weight.group_size // TURN if weight.group_size else weight.num_turns,
        1 if grouping is None else grouping.divisor,
    ]
    slabs = weight.num_slabs // 2 if paired else weight.num_slabs
    blocks = -(-num_rows // shape.rows) if grouping is None else grouping.blocks
    ends = [num_rows, weight.out_features]
    if isinstance(shape, Tile):
        arguments = [*operands[:4], None, *operands[4:], *ends, *sizes[:3], weight.codes]
        fed(shape, defines, x, arguments, slabs, blocks)
        return y
    ids = None if grouping is None else grouping.ids
    held, each = (2, 1) if paired else (shape.slabs, shape.slabs)
    defines |= {
        "PER_GROUP": 2 if weight.kind == CCQ else sizes[2] if weight.scaled else 1,
        "TILES": shape.tiles,
        "MT": held,
        "WARPS": shape.warps,
        "AHEAD": shape.ahead,
        "RESIDENT": shape.resident,
    }
    own = [x, x.stride(0) // 8, *operands, ids, *ends, x.shape[1]]
    native.launch(
        native.function("quant_few", defines), (-(-slabs // each), blocks, 1), shape.warps * 32,
        [*own, *sizes[:2], sizes[3], weight.codes],
        shared=few_shared(shape, held, weight.kind, weight.scaled),
    )  # fmt: skip
    return y


def fed(
    shape: Tile,
    defines: dict[str, int],
    x: torch.Tensor,
    arguments: list[Any],
    slabs: int,
    blocks: int,
) -> None:
    """Launch quant_tile.cu; `slabs` that a gate and what belongs to it share count once."""
    sizes = {
        "BN": shape.rows,
        "GROUPS": shape.groups,
        "SPLIT": shape.split,
        "STAGES": shape.stages,
        "THREADS": shape.threads,
        "UNPACKERS": shape.unpackers,
        "TEAMS": shape.teams,
        "AHEAD": shape.ahead,
        "RESIDENT": shape.resident,
    }
    own = shape.groups * (1 if defines["FORMAT"] == TRELLIS else 4) // (1 + defines["PAIRED"])
    grid = (-(-slabs // own), blocks, shape.split)
    native.launch(
        native.function("quant_tile", {**defines, **sizes}), grid, shape.threads,
        [tensor_map.boxes(x, shape.rows), *arguments],
        shared=tile_shared(shape, defines["FORMAT"], defines["SCALED"]), cluster=shape.split,
    )  # fmt: skip


def unpack(weight: Slabs, dtype: torch.dtype) -> torch.Tensor:
    """[(E,) N, K] of slabs in the dtype of activations, or as int8 without scales; K in whole
    eights, and N in whole slabs where there are experts."""
    lead = (weight.num_experts,) if weight.num_experts else ()
    shape = (*lead, weight.out_features, weight.in_features)
    y = torch.empty(shape, dtype=dtype, device=weight.data.device)
    is_int8 = dtype == torch.int8
    defines = {
        "HALF": int(dtype == torch.float16),
        "FORMAT": weight.kind,
        "SCALED": weight.scaled,
        "NUMBERS": int(is_int8),
        "Y_HALF": 0,
        "WARPS": 8,
    }
    turns, slabs = weight.num_turns, weight.num_slabs * max(1, weight.num_experts)
    arguments = [
        weight.data,
        weight.table(torch.bfloat16 if is_int8 else dtype),
        weight.scales,
        y,
        weight.out_features * max(1, weight.num_experts),
        weight.in_features,
        slabs,
        turns,
        weight.group_size // TURN if weight.group_size else turns,
        weight.codes,
    ]
    kernel = native.function("quant_unpack", defines)
    native.launch(kernel, (-(-turns // 8), slabs, 1), 256, arguments)
    return y


def as_numbers(weight: Slabs) -> Slabs:
    """int4 with one scale an output unpacked to int8 that lies row by row."""
    return replace(weight, kind=INT8_ROWS, data=unpack(weight, torch.int8))
