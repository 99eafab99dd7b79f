"""Products of more rows than quant_few.cu takes, or of as many an expert, by
quant_persistent.cu."""

from __future__ import annotations

import torch

from . import native
from .common import num_processors
from .native import tensor_map
from .quant_layout import SLAB_ROWS, TURN, Slabs
from .quant_native import Grouping
from .quant_shapes import Persistent, boxes, persistent_shared, slab_bytes


def persistent_product(
    shape: Persistent,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: Slabs,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    grouping: Grouping | None = None,
    paired: bool = False,
    is_fresh: bool = False,
) -> torch.Tensor:
    """x [T, K], half floats or for weights that lie row by row int8 or fp8 numbers, times the
    weight, in dtype. Rows of experts lie in the order of the blocks, in x and, where it is
    `paired`, in what comes out. `x_scales`: [T], or [T, K / 128], tokens fastest, where the weight
    has scales of blocks. `is_fresh`: kernels queued just now write the weights, so none is read
    before these have ended."""
    num_rows = x.shape[0] if grouping is None or paired else grouping.num_slots
    width = weight.out_features // 2 if paired else weight.out_features
    y = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    order = None if grouping is None else grouping.order
    blocks = -(-x.shape[0] // shape.rows) if grouping is None else grouping.blocks
    by_rows, turns = weight.lies_by_rows, _turns(weight)
    # The copy engine stores rows that begin at whole 16 bytes, where they lie like those of the
    # tiles.
    is_boxed = grouping is None and shape.split == 1 and weight.out_features % 8 == 0
    of_x = tensor_map.boxes(x, shape.rows if grouping is None else shape.box_rows)
    scales = weight.scales if weight.block_scales is None else weight.block_scales
    arguments = [
        of_x,
        _weight_boxes(weight, shape.groups * 64, paired=paired),
        tensor_map.boxes(y, shape.box_rows) if is_boxed else of_x,
        None if by_rows else weight.table(x.dtype),
        scales,
        x_scales,
        bias,
        y,
        None if order is None else order.slots,
        None if order is None else order.experts,
        x.shape[0] if grouping is None else grouping.num_slots,
        weight.out_features,
        weight.num_slabs,
        turns,
        weight.group_size // TURN if weight.group_size and not by_rows else turns,
        scales[0].numel() if weight.num_experts else 0,
        0 if x_scales is None else x_scales.stride(-1),
        blocks,
    ]
    tiles = blocks * -(-width // (shape.groups * (32 if paired else 64)))
    pieces, shared = _memory(shape, weight, is_boxed=is_boxed)
    flags = {
        "PAIRED": int(paired),
        "GROUPED": int(grouping is not None),
        "FRESH": int(is_fresh),
        "BOXES": pieces,
    }
    kernel = _kernel(shape, weight, x.dtype, dtype, flags)
    grid = (tiles if shape.split > 1 else min(tiles, num_processors()), 1, shape.split)
    native.launch(kernel, grid, shape.threads, arguments, shared=shared, cluster=shape.split)
    return y


def _turns(weight: Slabs) -> int:
    """Steps over the inputs."""
    return -(-weight.in_features // (2 * TURN)) if weight.lies_by_rows else weight.num_turns


def _memory(shape: Persistent, weight: Slabs, *, is_boxed: bool) -> tuple[int, int]:
    """Pieces in which the copy engine stores a tile, 0 where it does not, and bytes of shared
    memory."""
    by_block = weight.block_scales is not None
    if is_boxed:
        return boxes(shape, weight.kind, by_block=by_block)
    return 0, persistent_shared(shape, weight.kind, by_block=by_block)


def _kernel(
    shape: Persistent,
    weight: Slabs,
    of_x: torch.dtype,
    of_y: torch.dtype,
    flags: dict[str, int],
) -> native.Function:
    defines = {
        "HALF": int(of_x == torch.float16),
        "Y_HALF": int(of_y == torch.float16),
        "FORMAT": weight.kind,
        "SCALED": 0 if weight.lies_by_rows else weight.scaled,
        "BY_BLOCK": int(weight.block_scales is not None),
        "BN": shape.rows,
        "BOX_ROWS": shape.box_rows,
        "GROUPS": shape.groups,
        "SPLIT": shape.split,
        "STAGES": shape.stages,
        "THREADS": shape.threads,
    }
    return native.function("quant_persistent", {**defines, **flags})


def _weight_boxes(weight: Slabs, outputs: int, *, paired: bool) -> bytes:
    """What one copy brings of a tile of so many outputs; of slabs of gates and what belongs to them
    it takes two."""
    if not weight.lies_by_rows:
        size = slab_bytes(weight.kind)
        slabs = weight.data.view(-1, weight.num_turns * size)
        return tensor_map.slab_boxes(slabs, size, outputs // SLAB_ROWS // (1 + paired))
    if paired:
        stored = weight.data.view(-1, weight.out_features, weight.in_features)
        return tensor_map.gate_boxes(stored, outputs)
    return tensor_map.boxes(weight.data.view(-1, weight.in_features), outputs)
