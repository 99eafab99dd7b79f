"""Products with packed weights, `linear_<format>` of contracts/quant_formats.py.

The native kernels read packed weights as they are. Many rows: fp8 of large layers by cuBLAS; codes
and groups with scales, and layers too small for native tiles, by cuBLAS on weights unpacked for the
call. What native kernels cannot read, and every weight on cards that they are not written for, is
quant_any.py's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
import torch.nn.functional as F

from . import native, quant_any, quant_blocks
from .common import batch_invariant, num_processors
from .matmul import matmul
from .quant_grouped import grouped_product, of_slabs
from .quant_layout import CCQ, FP8, FP8_ROWS, INT4, INT8, INT8_ROWS, TRELLIS, Slabs
from .quant_native import Grouping, as_numbers, product, unpack
from .quant_persistent import persistent_product
from .quant_round import FP8_BLOCK, Seen
from .quant_shapes import (
    Blocks,
    Chosen,
    Few,
    Grouped,
    Persistent,
    Tile,
    blocks,
    persistent,
    slab_bytes,
    tile_room,
    tile_shared,
)
from .quant_times import (
    BY_BLOCKS,
    GROUPS_MORE,
    UNPACKED,
    library_by_blocks,
    library_unpacked,
    quickest,
)
from .quant_weights import Weights, dequantized

_FEW_ROWS: Final = 16
_SHORT, _LONG = 32, 96  # turns up to which inputs are few, and from which they are many
_SOME_ROWS: Final = 256
# Slabs of layers that have too few tiles of quant_persistent.cu, and slabs times turns of those
# where its ends take longer than its turns.
_NARROW, _SMALL = 64, 1 << 12
# Rows from which the library is faster on what took long to unpack.
_MANY_ROWS: Final = 1024
# Rows of a tile of quant_persistent.cu, and what a tile costs besides, in rows.
_TILES: Final = (64, 128, 256)
TILE_ENDS: Final = 60


def linear(x: torch.Tensor | Seen, weight: Weights, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] as the format sees it times weight [N, K] transposed, plus bias. What its see() made
    may stand in x's place."""
    slabs = weight.slabs
    if isinstance(x, torch.Tensor):
        if not x.shape[0]:
            return torch.empty((0, weight.out_features), dtype=x.dtype, device=x.device)
        if slabs is None:
            return quant_any.linear(weight.seen(x), weight.unread, bias)
        x = x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
        if not native_runs(x):
            return _multiply(weight.seen(x), dequantized(slabs, x.dtype), bias)
    if slabs is None:
        raise TypeError("rows were rounded for a weight that no kernel here reads")
    rows = x.shape[0] if isinstance(x, torch.Tensor) else x.rows
    shape = choose(slabs, rows, rounds=bool(weight.rounding))
    seen = weight.see(x, shape) if isinstance(x, torch.Tensor) else x
    if shape is None:
        return _by_library(seen, slabs, bias)
    return multiply(shape, seen.numbers, seen.scales, slabs, bias, seen.dtype)


def multiply(
    shape: Few | Tile | Persistent | Blocks | Grouped,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    slabs: Slabs,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    grouping: Grouping | None = None,
    paired: bool = False,
) -> torch.Tensor:
    """By one of the kernels: x as it takes them, and what its rows are multiplied with, times the
    weight, in dtype. `paired`: silu(gate) times what belongs to it."""
    if isinstance(shape, Blocks) and scales is not None:
        return quant_blocks.product(shape, x, scales, slabs, bias, dtype, grouping)
    if isinstance(shape, Persistent):
        return persistent_product(
            shape, x, scales, slabs, bias, dtype, grouping=grouping, paired=paired
        )
    if isinstance(shape, Few | Tile):
        return product(
            shape, x, slabs, bias, dtype=dtype, x_scales=scales, grouping=grouping, paired=paired
        )
    if isinstance(shape, Grouped) and grouping is not None and grouping.order is not None:
        own = grouping.order, grouping.num_slots
        matrix = of_slabs(shape, slabs, dtype)
        return grouped_product(shape, x, scales, matrix, dtype, *own, paired=paired)
    raise TypeError(f"{shape} multiplies no such rows")


def native_runs(x: torch.Tensor) -> bool:
    """Whether the native kernels can multiply x: two-byte numbers on a Hopper GPU."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and native.has_wgmma()


def choose(slabs: Slabs, rows: int, *, rounds: bool = False) -> Chosen:
    """The kernel for so many rows, as measured on an H200; None for the library. `rounds`:
    activations are rounded, so that many rows of int4 are better multiplied as int8."""
    if batch_invariant():
        # One order of sums for all numbers of rows.
        if slabs.lies_by_rows:
            return persistent(64, slabs.kind, 1)
        if slabs.kind == CCQ:
            return None
        return with_copies(Tile(128, 128, 1, 4, 8, 4, 1), slabs.kind, slabs.scaled)
    if slabs.lies_by_rows:
        # Eight rows of x are read as float16 with the weights; more are worth the matrix units' own
        # int8 and fp8.
        if rows <= 8:
            return _few_shape(slabs, rows)
        if slabs.block_scales is not None:
            return _blocks_shape(slabs, rows)
        by_library = _library_wins(slabs, rows)
        return _persistent_shape(slabs, rows) or (None if by_library else _few_tiles(slabs, rows))
    size = size_of(slabs.num_slabs)
    takes_more = slabs.kind == INT4 and slabs.scaled and size == 2
    takes_more = takes_more and slabs.num_slabs <= 4 * num_processors()
    if rows <= (32 if takes_more else _FEW_ROWS):
        return _few_shape(slabs, rows)
    if slabs.kind == CCQ or slabs.scaled:
        return _unpacked_shape(slabs, rows)
    if rounds and rows > _SOME_ROWS:
        return None
    is_narrow, is_small = slabs.num_slabs <= _NARROW, slabs.num_slabs * slabs.num_turns < _SMALL
    if rows <= (128 if is_narrow else 64 if is_small else 0):
        return _few_rows_shape(slabs, rows)
    return _unpacking_shape(slabs, rows)


def size_of(count: int) -> int:
    """Of a layer with so many sixteens of outputs, by which kernels are chosen: less than 4096
    outputs, or than 8192."""
    return 0 if count < 256 else 1 if count < 512 else 2


def _unpacked_shape(slabs: Slabs, rows: int) -> Tile | Persistent | None:
    """Where weights take long to unpack: groups of inputs with scales, and codes."""
    size, is_ccq, count = size_of(slabs.num_slabs), slabs.kind == CCQ, slabs.num_slabs
    if not is_ccq and rows > 128 and count > _NARROW:
        return _unpacking_shape(slabs, rows)
    if rows > (_MANY_ROWS if size == 2 else _SOME_ROWS if is_ccq and size else 512):
        return None
    if not is_ccq and size < 2 and rows <= 128:
        return _few_rows_shape(slabs, rows)
    if size == 2 and rows > 128 and not fills(count, rows):
        return None
    return tile_shape(slabs.kind, slabs.scaled, count, rows)


def _few_shape(slabs: Slabs, rows: int) -> Few:
    """As many slabs a warp as leave work for every multiprocessor."""
    tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    count, turns, processors = slabs.num_slabs, slabs.num_turns, num_processors()
    is_narrow, is_small = count < processors, count < 2 * processors
    if is_small:
        return Few(tiles, 1, 16, 3, 1) if is_narrow else Few(tiles, 1, 8, 4, 2)
    if tiles > 1 and slabs.kind == INT4 and turns > _SHORT:
        return Few(tiles, 4, 8, 3, 1)
    if tiles == 1 and slabs.kind == INT8 and 4 * processors < count <= 5 * processors:
        # One round of blocks, where two slabs each would leave most places of a second one empty.
        return Few(1, 5, 8, 4, 1)
    return Few(tiles, 2, 8, 4 if tiles == 1 and slabs.kind in (INT8, FP8) else 3, 2)


def _parts(blocks: int, each: float, most: int) -> int:
    """How many blocks divide K, so that a multiprocessor has `each` blocks."""
    split = 1
    while split < most and blocks * split * 2 <= num_processors() * each:
        split *= 2
    return split


def _few_rows_shape(slabs: Slabs, rows: int) -> Tile:
    """Layers of less than 8192 outputs: narrow tiles, and blocks that divide K where these are
    few."""
    narrow, is_narrow = -(-slabs.num_slabs // 4), slabs.num_slabs <= _NARROW
    block = 32 if rows <= 32 else 64 if rows <= 64 or is_narrow else 128
    tiles, most = narrow * -(-rows // block), 8 if rows <= 64 else 4
    split = _parts(tiles, 0.75, most) if is_narrow else _parts(tiles, 1.0, 4)
    if is_narrow and rows > 64 and split < most and slabs.num_turns >= _SHORT:
        # Many turns: rather one tile of all rows, whose blocks divide more of K.
        block, split = 96 if rows <= 96 else 128, _parts(narrow, 0.75, most)
    return with_copies(Tile(block, 64, split, 4, 8, 4, 1), slabs.kind, slabs.scaled)


def tile_shape(kind: int, scaled: int, count: int, rows: int) -> Tile | None:
    """quant_tile.cu for a layer of so many sixteens of outputs; None for more rows than a small
    layer takes."""
    size, across, narrow = size_of(count), -(-count // 8), -(-count // 4)
    is_ccq, is_trellis = kind == CCQ, kind == TRELLIS
    halves = _parts(narrow * -(-rows // 128), 0.5 if rows <= _SOME_ROWS else 1.0, 4)
    if rows <= 32:
        tile = Tile(32, 128, _parts(across, 1.0, 8), 4, 8, 4, 1)
    elif rows <= 64 and size == 2:
        tile = Tile(64, 128, _parts(across, 1.0, 2), 8 if is_trellis else 4, 8, 4, 1)
    elif rows <= 64:
        tile = Tile(64, 64, halves, 8, 4, 4, 1) if is_trellis else Tile(64, 64, halves, 4, 8, 4, 1)
    elif rows <= 128 and size == 2:
        tile = Tile(128, 128, _parts(across, 1.0, 2), 4, 8, 4, 1)
    elif is_ccq and size < 2:  # so small that a multiprocessor has two blocks
        return (
            Tile(128, 64, halves, 4, 8, 4, 2)
            if rows <= 128 or not size
            else Tile(128, 64, 1, 4, 4, 2, 5)
        )
    elif rows <= 128 or (rows <= 512 and not size):
        tile = Tile(128, 64, halves, 4, 4 if is_trellis else 8, 4, 1)
    elif size == 2:
        tile = Tile(256, 128, _parts(across * -(-rows // 256), 1.0, 2), 4, 4, 2, 1)
    elif rows <= _SOME_ROWS:
        tile = Tile(128, 128, 1, 4, 8, 4, 1)
    elif rows <= 512:
        tile = Tile(128, 192, 1, 4, 4, 4, 1)
    else:
        return None
    return with_copies(tile, kind, scaled)


def with_copies(tile: Tile, kind: int, scaled: int) -> Tile:
    """As many turns ahead, to eight, as there is shared memory for."""
    deeper = replace(tile, ahead=tile.ahead + 1)
    if deeper.ahead > 8 or tile_shared(deeper, kind, scaled) > tile_room(deeper):
        return tile
    return with_copies(deeper, kind, scaled)


def fills(count: int, rows: int) -> bool:
    """Whether tiles of 256 rows by 128 outputs keep the GPU busy enough to be worth more than the
    library, which loses less by unpacking the more rows there are."""
    across, processors = -(-count // 8), num_processors()
    split = _parts(across * -(-rows // 256), 1.0, 2)
    rounds = -(-across * -(-rows // 256) * split // processors)
    busy = across * rows / 256 * split / (rounds * processors)
    return busy >= (0.5 if rounds == 1 else 0.7 if rows <= 512 else 0.85 if rows <= 1024 else 0.92)


def _unpacking_shape(slabs: Slabs, rows: int) -> Persistent | None:
    """Tiles of quant_persistent.cu, which unpacks in registers; None where unpacking all weights,
    and the library, should be quicker."""
    count, cores = 16 * slabs.num_slabs, num_processors()
    inputs, more = 64 * slabs.num_turns, GROUPS_MORE if slabs.scaled else 0.0
    taken, *tiles = quickest(UNPACKED, count, inputs, rows, cores, more)
    stored = slabs.num_slabs * slabs.num_turns * slab_bytes(slabs.kind)
    if taken > library_unpacked(stored, count * inputs, rows):
        return None
    return persistent(tiles[0], slabs.kind, *tiles[1:])


def _persistent_shape(slabs: Slabs, rows: int) -> Persistent | None:
    """int8 and fp8 numbers by rows: tiles of as many rows as keep the GPU busy. None where the
    library, or blocks that divide K, are faster."""
    size = size_of(slabs.num_slabs)
    # Two tiles of 64 rows have to be full.
    if rows <= 64 or (size == 2 and rows < 128) or (rows <= 128 and slabs.num_turns >= _LONG):
        return None
    if slabs.kind == FP8_ROWS and ((size == 2 and rows > 128) or rows > _MANY_ROWS):
        return None
    across, processors = -(-slabs.num_slabs // 8), num_processors()

    def taken(tile: int) -> int:
        """In rows of one multiprocessor."""
        return -(-across * -(-rows // tile) // processors) * (tile + TILE_ENDS)

    tile = min(_TILES, key=taken)
    is_busy = across * -(-rows // tile) >= 0.6 * processors
    return persistent(tile, slabs.kind) if is_busy else None


def _few_tiles(slabs: Slabs, rows: int) -> Persistent:
    """int8 and fp8 numbers by rows: tiles of 64 outputs, whose blocks divide K where these leave
    multiprocessors without work; of many rows of large layers one tile of all rows."""
    narrow, wide, processors = -(-slabs.num_slabs // 4), -(-slabs.num_slabs // 8), num_processors()
    tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiles, most = narrow * -(-rows // tile), min(4, slabs.num_turns // 10)
    if rows > 64 and (2 * narrow > 0.75 * processors or tiles > processors):
        # Rows that are not there are brought slowly: 96 where one has them all.
        tile = 96 if rows <= 96 else 128
        groups = 1 if rows <= 96 and 2 * narrow <= processors else 2
        tiles = (narrow if groups == 1 else wide) * -(-rows // tile)
        return persistent(tile, slabs.kind, groups, _parts(tiles, 0.75, 2))
    if rows <= 16 and most > 2 and 0.35 * processors < 4 * wide <= 0.75 * processors:
        return persistent(tile, slabs.kind, 2, 4)
    # Tiles of 128 outputs where those of 64 leave a part of a round without work.
    is_wide = rows <= 32 and 0.5 * processors < tiles <= 0.75 * processors
    groups = 2 if is_wide or processors < tiles <= 2 * processors else 1
    share = 0.5 if slabs.kind == INT8_ROWS and rows > 16 else 0.75
    return persistent(tile, slabs.kind, groups, _parts(tiles, share, most))


def _library_wins(slabs: Slabs, rows: int) -> bool:
    """Whether cuBLAS multiplies such fp8 numbers, and faster."""
    if slabs.kind != FP8_ROWS or slabs.out_features % 16 or slabs.in_features % 16:
        return False
    return (rows > 128 and slabs.num_slabs >= 256) or rows > 512


def _blocks_shape(slabs: Slabs, rows: int) -> Persistent | Blocks | None:
    """fp8 numbers with scales of blocks; None where cuBLAS multiplies them, and should be
    quicker."""
    outputs, inputs, cores = slabs.out_features, slabs.in_features, num_processors()
    taken, block, groups, split = quickest(BY_BLOCKS, outputs, inputs, rows, cores)
    is_whole = outputs % FP8_BLOCK == inputs % FP8_BLOCK == 0
    if is_whole and library_by_blocks(outputs, inputs, rows, cores) < taken:
        return None
    if block == 128:
        return blocks(64 * groups, split)
    return persistent(block, slabs.kind, groups, split)


def _by_library(x: Seen, slabs: Slabs, bias: torch.Tensor | None) -> torch.Tensor:
    if x.scales is None or x.numbers.dtype == torch.float16:
        return _multiply(x.values(), unpack(slabs, x.dtype), bias)
    if slabs.kind == FP8_ROWS:
        return _fp8_by_library(x, x.scales, slabs, bias)
    # int4 weights with rounded activations: as int8 they have a faster kernel.
    plain = as_numbers(slabs)
    shape = _persistent_shape(plain, x.rows) or _few_tiles(plain, x.rows)
    return persistent_product(shape, x.numbers, x.scales, plain, bias, x.dtype, is_fresh=True)


def _fp8_by_library(
    x: Seen, x_scales: torch.Tensor, slabs: Slabs, bias: torch.Tensor | None
) -> torch.Tensor:
    by_block = slabs.block_scales is not None
    outputs = slabs.scales[: slabs.out_features].unsqueeze(0)
    y = torch._scaled_mm(
        x.numbers,
        slabs.data.view(torch.float8_e4m3fn).t(),
        x_scales if by_block else x_scales.unsqueeze(1),
        outputs if slabs.block_scales is None else slabs.block_scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=not by_block,
    )
    y = y[: x.rows].to(x.dtype)
    return y if bias is None else y.add_(bias)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return matmul(x, weight, bias) if batch_invariant() else F.linear(x, weight, bias)
