"""Products of hundreds of rows, or of hundreds of rows an expert, with fp8 weights that have scales
of blocks, by quant_blocks.cu."""

from __future__ import annotations

from typing import Final

import torch

from . import native
from .common import num_processors
from .native import tensor_map
from .quant_layout import Slabs
from .quant_native import Grouping
from .quant_round import FP8_BLOCK
from .quant_shapes import BLOCK_PIECES, Blocks, blocks, blocks_shared

_BOX_ROWS: Final = 16  # of results that a warp stores at a time


def product(
    shape: Blocks,
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: Slabs,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    grouping: Grouping | None = None,
) -> torch.Tensor:
    """x [T, K], rounded by blocks, with scales [T, K / 128], tokens fastest, times the weight, in
    dtype. Rows of experts lie in the order of the blocks in x, by slots in what comes out."""
    num_rows = x.shape[0] if grouping is None else grouping.num_slots
    y = torch.empty((num_rows, weight.out_features), dtype=dtype, device=x.device)
    _multiply(shape, x, x_scales, weight, bias, y, grouping)
    return y


def gated_product(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: Slabs,
    grouping: Grouping,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) times what belongs to it, of rows that lie in the order of the blocks: rounded to
    dtype and then by blocks, as fp8_blocks would (numbers, scales). Gates are whole blocks of
    FP8_BLOCK."""
    rows, width = x.shape[0], weight.out_features // 2
    y = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    y_scales = torch.empty((width // FP8_BLOCK, rows), dtype=torch.float32, device=x.device)
    _multiply(blocks(256), x, x_scales, weight, None, y, grouping, y_scales, dtype)
    return y, y_scales.t()


def _multiply(
    shape: Blocks,
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: Slabs,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    grouping: Grouping | None = None,
    y_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """x [T, K] with scales [T, K / 128], tokens fastest, times the weight into y. `y_scales`: the
    weight's outputs are gates and up values."""
    if (scales := weight.block_scales) is None:
        raise TypeError("a weight without scales of blocks was asked for a product by blocks")
    paired = y_scales is not None
    num_rows, width = y.shape
    order = None if grouping is None else grouping.order
    count = -(-num_rows // shape.rows) if grouping is None else grouping.blocks
    # The copy engine stores rows that begin at whole 16 bytes and lie like those of the tiles.
    is_boxed = grouping is None and weight.out_features % 8 == 0
    of_x = tensor_map.boxes(x, shape.rows)
    arguments = [
        of_x,
        tensor_map.boxes(weight.data.view(-1, weight.in_features), shape.columns // (1 + paired)),
        tensor_map.boxes(y, _BOX_ROWS) if is_boxed else of_x,
        scales,
        x_scales,
        bias,
        y,
        y_scales,
        None if order is None else order.slots,
        None if order is None else order.experts,
        num_rows if grouping is None else grouping.num_slots,
        weight.out_features,
        -(-weight.in_features // FP8_BLOCK),
        scales[0].numel() if weight.num_experts else 0,
        x_scales.stride(1),
        count,
    ]
    defines = {
        "HALF": 0,
        "Y_HALF": int((dtype or y.dtype) == torch.float16),
        "FORMAT": weight.kind,
        "SCALED": 0,
        "PAIRED": int(paired),
        "GROUPED": int(grouping is not None),
        "BN": shape.wave,
        "WAVES": shape.columns // shape.wave,
        "BOXES": BLOCK_PIECES if is_boxed else 0,
        "STAGES": shape.stages,
        "THREADS": shape.threads,
        "SPLIT": shape.split,
    }
    tiles = count * -(-width // (shape.columns // (1 + paired)))
    at_once = tiles if shape.split > 1 else min(tiles, num_processors())
    native.launch(
        native.function("quant_blocks", defines), (at_once, 1, shape.split), shape.threads,
        arguments, shared=blocks_shared(shape), cluster=shape.split,
    )  # fmt: skip
