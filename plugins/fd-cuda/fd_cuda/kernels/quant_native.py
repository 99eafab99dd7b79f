"""Launches of native/quant_gemv.cu, quant_gemm.cu and quant_rows.cu: products of activations and packed
weights."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import native
from .native import tensor_map
from .quant_layout import CCQ, INT4, TURN, Slabs
from .quant_order import by_codes

if TYPE_CHECKING:
    from .routing import Order


@dataclass(frozen=True, slots=True)
class Gemv:
    """How quant_gemv.cu is specialized; serves 8 * tiles rows."""

    tiles: int
    slabs: int  # a warp's, of outputs
    warps: int
    ahead: int
    resident: int  # blocks a multiprocessor should hold

    @property
    def rows(self) -> int:
        """Rows of x that a block computes."""
        return 8 * self.tiles

    def __str__(self) -> str:
        return f"gemv {self.tiles}t {self.slabs}s {self.warps}w {self.ahead}a {self.resident}r"


@dataclass(frozen=True, slots=True)
class Gemm:
    """How quant_gemm.cu is specialized."""

    rows: int  # of x, of a block
    groups: int  # of four warps
    split: int  # blocks that divide K
    stages: int
    ahead: int  # turns that weights are asked for ahead, in registers; 0 for through shared memory
    resident: int = 1  # blocks a multiprocessor should hold

    def __str__(self) -> str:
        tile = f"{self.rows}x{self.groups * 64}"
        return f"gemm {tile} /{self.split} {self.stages}st {self.ahead}a {self.resident}r"


@dataclass(frozen=True, slots=True)
class RowGemm:
    """How quant_rows.cu is specialized."""

    rows: int  # of x, of a block
    groups: int  # of four warps, 64 outputs each
    split: int  # blocks that divide K
    stages: int

    def __str__(self) -> str:
        return f"rows {self.rows}x{self.groups * 64} /{self.split} {self.stages}st"


@dataclass(frozen=True, slots=True)
class Pipe:
    """How quant_pipe.cu is specialized."""

    rows: int  # of x, of a block
    groups: int  # of four warps, 64 outputs each
    split: int  # blocks that divide K
    stages: int
    resident: int = 1  # blocks a multiprocessor should hold

    @property
    def threads(self) -> int:
        """Those that multiply and those that feed."""
        return self.groups * 128 + (128 if self.rows == 256 else 32)

    def __str__(self) -> str:
        tile = f"{self.rows}x{self.groups * 64}"
        return f"pipe {tile} /{self.split} {self.stages}st {self.resident}r"


Shape = Gemv | Gemm | Pipe


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
    shape: Shape,
    x: torch.Tensor,
    weight: Slabs,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    x_scales: torch.Tensor | None = None,
    grouping: Grouping | None = None,
    paired: bool = False,
) -> torch.Tensor:
    """x [T, K] times the weight, in dtype or in x's own; rows of x are whole 16 bytes. Pipe: rows of experts lie
    in the order of the blocks, in x and, where it is `paired`, in what comes out."""
    dtype = dtype or x.dtype
    is_ordered = isinstance(shape, Pipe) and paired
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
    operands = [
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
    if isinstance(shape, Pipe):
        arguments = [*operands, num_rows, weight.out_features, *sizes, weight.codes]
        _pipe(shape, defines, x, arguments, slabs, blocks)
        return y
    ids = None if grouping is None else grouping.ids
    if weight.kind == CCQ and isinstance(shape, Gemv):
        _gemv(
            shape, {**defines, "WIDTH": x.shape[1]},
            [
                x, ctypes.c_longlong(x.stride(0)), *operands[:3], weight.codes, weight.lines,
                *operands[4:], ids, num_rows, weight.out_features, sizes[0], sizes[3],
            ],
            slabs, blocks,
        )  # fmt: skip
        return y
    arguments = [
        x,
        x.stride(0) // 8,
        *operands,
        ids,
        num_rows,
        weight.out_features,
        x.shape[1],
        *sizes,
    ]
    if isinstance(shape, Gemv):
        _gemv(shape, defines, arguments, slabs, blocks)
    else:
        _gemm(shape, defines, arguments, slabs, blocks)
    return y


def _gemv(
    shape: Gemv, defines: dict[str, int], arguments: list[Any], slabs: int, blocks: int
) -> None:
    per_block = 1 if defines["PAIRED"] else shape.slabs
    held = 2 if defines["PAIRED"] else shape.slabs
    sizes = {
        "TILES": shape.tiles,
        "MT": held,
        "WARPS": shape.warps,
        "AHEAD": shape.ahead,
        "RESIDENT": shape.resident,
    }
    name = "ccq_gemv" if defines["FORMAT"] == CCQ else "quant_gemv"
    kernel = native.function(name, {**defines, **sizes})
    grid = (-(-slabs // per_block), blocks, 1)
    native.launch(kernel, grid, shape.warps * 32, arguments, shared=gemv_shared(shape, held))


def gemv_shared(shape: Gemv, held: int) -> int:
    """Bytes of shared memory of a block: inputs of its warps, or their parts of the sums of `held` slabs."""
    return shape.warps * max(shape.ahead * shape.rows * 128, held * 16 * (shape.rows + 1) * 4)


def _gemm(
    shape: Gemm, defines: dict[str, int], arguments: list[Any], slabs: int, blocks: int
) -> None:
    sizes = {
        "BN": shape.rows,
        "GROUPS": shape.groups,
        "SPLIT": shape.split,
        "STAGES": shape.stages,
        "AHEAD": shape.ahead,
        "RESIDENT": shape.resident,
        "MT": 1 + defines["PAIRED"],
    }
    kernel = native.function("quant_gemm", {**defines, **sizes})
    grid = (-(-slabs // (4 * shape.groups)), blocks, shape.split)
    shared = gemm_shared(shape, defines["FORMAT"], paired=bool(defines["PAIRED"]))
    native.launch(kernel, grid, shape.groups * 128, arguments, shared=shared, cluster=shape.split)


def _pipe(
    shape: Pipe,
    defines: dict[str, int],
    x: torch.Tensor,
    arguments: list[Any],
    slabs: int,
    blocks: int,
) -> None:
    sizes = {
        "BN": shape.rows,
        "GROUPS": shape.groups,
        "SPLIT": shape.split,
        "STAGES": shape.stages,
        "RESIDENT": shape.resident,
        "THREADS": shape.threads,
    }
    if defines["FORMAT"] == CCQ:
        x = by_codes(x)
    kernel = native.function("quant_pipe", {**defines, **sizes})
    outputs = 4 if defines["PAIRED"] else 4 * shape.groups
    grid = (-(-slabs // outputs), blocks, shape.split)
    native.launch(
        kernel, grid, shape.threads, [tensor_map.boxes(x, shape.rows), *arguments],
        shared=pipe_shared(shape, defines["FORMAT"]), cluster=shape.split,
    )  # fmt: skip


def pipe_shared(shape: Pipe, kind: int) -> int:
    """Bytes of shared memory of a block: barriers, tiles of x and of weights, or parts of the sums where these were."""
    weights = shape.groups * 4 * (512 if kind == INT4 else 256 if kind == CCQ else 1024)
    tiles = shape.stages * (shape.rows * 128 + weights)
    parts = shape.rows * (shape.groups * 64 + 4) * 4
    return 16 * shape.stages + 1024 + max(tiles, parts)


def gemm_shared(shape: Gemm, kind: int, *, paired: bool) -> int:
    """Bytes of shared memory of a block: tiles of x, and of weights where they take that way, parts of the sums,
    what aligning takes."""
    held = shape.groups * (1 + paired)
    weights = 0 if shape.ahead else held * (2048 if kind == INT4 else 4096)
    tiles = shape.stages * (shape.rows * 128 + weights)
    parts = shape.rows * (held * 64 + 4) * 4
    is_apart = shape.split > 1 and shape.ahead > 0
    return 1024 + (tiles + parts if is_apart else max(tiles, parts))


def rows_product(
    shape: RowGemm,
    numbers: torch.Tensor,
    x_scales: torch.Tensor,
    weight: Slabs,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    by_block: bool,
    grouping: Grouping | None = None,
    paired: bool = False,
    is_fresh: bool = False,
) -> torch.Tensor:
    """int8 or fp8 numbers [T, K] times weights that lie row by row, in dtype. `x_scales`: [T], or `by_block`
    [T, K / 128] with tokens fastest, as the weight's are of blocks then. `paired`: shape.groups is 2.
    `is_fresh`: kernels queued just now write the weights, so none is read before these have ended."""
    num_rows = numbers.shape[0] if grouping is None else grouping.num_slots
    width = weight.out_features // 2 if paired else weight.out_features
    y = torch.empty((num_rows, width), dtype=dtype, device=numbers.device)
    defines = {
        "HALF": 0,
        "Y_HALF": int(dtype == torch.float16),
        "FORMAT": weight.kind,
        "SCALED": 0,
        "BY_BLOCK": int(by_block),
        "PAIRED": int(paired),
        "GROUPED": int(grouping is not None),
        "FRESH": int(is_fresh),
        "BN": shape.rows,
        "GROUPS": shape.groups,
        "SPLIT": shape.split,
        "STAGES": shape.stages,
    }
    scales = weight.block_scales if by_block else weight.scales
    if scales is None:
        raise TypeError("a weight without scales of blocks was asked for a product by blocks")
    order = None if grouping is None else grouping.order
    arguments = [
        numbers,
        weight.data,
        x_scales,
        scales,
        bias,
        y,
        None if order is None else order.slots,
        None if order is None else order.experts,
        num_rows,
        weight.out_features,
        weight.in_features,
        scales[0].numel() if weight.num_experts else 0,
        numbers.shape[0],
        1 if grouping is None else grouping.divisor,
    ]
    outputs = shape.groups * (32 if paired else 64)
    blocks = -(-num_rows // shape.rows) if grouping is None else grouping.blocks
    kernel = native.function("quant_rows", defines)
    tiles = -(-width // outputs)
    grid = (blocks, tiles, shape.split) if grouping is None else (tiles, blocks, shape.split)
    native.launch(
        kernel, grid, shape.groups * 128, arguments,
        shared=rows_shared(shape, by_block=by_block), cluster=shape.split,
    )  # fmt: skip
    return y


def rows_shared(shape: RowGemm, *, by_block: bool) -> int:
    """Bytes of shared memory of a block of quant_rows.cu: tiles, parts of the sums, scales of turns, what
    aligning takes."""
    tiles = shape.stages * (shape.groups * 64 + shape.rows) * 128
    parts = shape.rows * (shape.groups * 64 + 4) * 4
    factors = shape.stages * shape.rows * 4 if by_block else 0
    return 1024 + (tiles + parts if shape.split > 1 else max(tiles, parts)) + factors


def unpack(weight: Slabs, dtype: torch.dtype) -> torch.Tensor:
    """[(E,) N, K] of slabs in the dtype of activations, or as int8 without scales; K in whole eights, and N in
    whole slabs where there are experts."""
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
