"""Products with packed weights, `linear_<format>` of contracts/quant_formats.py.

Few rows: the native kernels, which read packed weights as they are. Many rows: cuBLAS on int8 or
fp8 where the format rounds activations, else on weights unpacked for the call. Where native kernels
cannot run (no Hopper GPU, float32) plain tensor code dequantizes at every call; so it does for what
they cannot read.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from . import native
from .common import batch_invariant, num_processors
from .matmul import matmul
from .quant_layout import CCQ, FP8_ROWS, INT4, INT8_ROWS, Slabs
from .quant_native import Gemm, Gemv, RowGemm, Shape, product, rows_product, unpack
from .quant_round import FP8_BLOCK, fp8_blocks, round_rows, scale_product
from .quant_weights import Weights, dequantized

_FEW_ROWS: Final = 16
_SOME_ROWS: Final = 256
# cuBLAS multiplies int8 from so many rows on, in whole sixteens of K and N.
_LEAST_INT8_ROWS: Final = 17


def linear(x: torch.Tensor, weight: Weights, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] as the format sees it times weight [N, K] transposed, plus bias."""
    slabs, rows = weight.slabs, x.shape[0]
    if not rows:
        return torch.empty((0, weight.out_features), dtype=x.dtype, device=x.device)
    if slabs is None:
        return _multiply(weight.seen(x), weight.dequantized(x.dtype), bias)
    x = x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    if not native_runs(x):
        return _multiply(weight.seen(x), dequantized(slabs, x.dtype), bias)
    shape = choose(slabs, rows)
    if isinstance(shape, RowGemm):
        numbers, of_rows = weight.numbers(x)
        by_block = weight.rounding == "block"
        return rows_product(shape, numbers, of_rows, slabs, bias, x.dtype, by_block=by_block)
    if shape is not None:
        seen, scales = weight.round(x)
        return product(shape, seen, slabs, bias, dtype=x.dtype, x_scales=scales)
    return _by_library(x, weight, slabs, bias)


def native_runs(x: torch.Tensor) -> bool:
    """Whether the native kernels can multiply x: two-byte numbers on a Hopper GPU."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and native.has_wgmma()


def choose(slabs: Slabs, rows: int) -> Shape | RowGemm | None:
    """The kernel for so many rows, as measured on an H200; None for the library."""
    if batch_invariant():
        # One order of sums for all numbers of rows.
        by_rows = slabs.kind in (INT8_ROWS, FP8_ROWS)
        return RowGemm(64, 2, 1, 5) if by_rows else Gemm(128, 2, 1, 4, 8)
    few = slabs.kind == CCQ or (slabs.kind == INT4 and slabs.num_slabs >= 256)
    if rows <= _FEW_ROWS or (rows <= 32 and few):
        return _gemv_shape(slabs, rows)
    if slabs.kind in (INT8_ROWS, FP8_ROWS):
        return _rows_shape(slabs, rows)
    if slabs.kind == CCQ or rows > _SOME_ROWS:
        return None
    return _gemm_shape(slabs.num_slabs, rows)


def _gemv_shape(slabs: Slabs, rows: int) -> Gemv:
    """As many slabs a warp as leave work for every multiprocessor."""
    tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    count, processors = slabs.num_slabs, num_processors()
    if tiles > 1 and slabs.kind == INT4 and count >= 2 * processors:
        return Gemv(tiles, 4, 8, 4, 1)
    if count >= 2 * processors:
        return Gemv(tiles, 2, 8, 4, 2)
    return Gemv(tiles, 1, 8, 4, 2) if count >= processors else Gemv(tiles, 1, 16, 4, 1)


def _gemm_shape(num_slabs: int, rows: int) -> Gemm:
    """So many parts of K that the blocks fill the card once."""
    block = 32 if rows <= 32 else 64 if rows <= 64 else 128
    groups = 2 if num_slabs >= 128 else 1
    tiles, split = -(-num_slabs // (4 * groups)) * -(-rows // block), 1
    while split < 8 and tiles * split * 2 <= num_processors() * 1.1:
        split *= 2
    return Gemm(block, groups, split, 6, 8, 1)


def _rows_shape(slabs: Slabs, rows: int) -> RowGemm | None:
    """Up to some hundred rows, and where the library has no such product."""
    if rows > _SOME_ROWS and _library_has(slabs):
        return None
    block = 32 if rows <= 32 else 64 if rows <= 64 else 128
    groups = 2 if slabs.num_slabs >= 128 else 1
    tiles, split = -(-slabs.num_slabs // (4 * groups)) * -(-rows // block), 1
    while split < 8 and tiles * split * 2 <= num_processors() * 1.1:
        split *= 2
    return RowGemm(block, groups, split, 4 if block == 128 else 6)


def _library_has(slabs: Slabs) -> bool:
    """Whether cuBLAS multiplies such numbers: whole sixteens, whole blocks, four of them at a time along K."""
    if slabs.block_scales is None:
        return slabs.out_features % 16 == 0
    return slabs.out_features % FP8_BLOCK == 0 and slabs.in_features % (4 * FP8_BLOCK) == 0


def _by_library(
    x: torch.Tensor, weight: Weights, slabs: Slabs, bias: torch.Tensor | None
) -> torch.Tensor:
    rows, width, depth = x.shape[0], slabs.out_features, slabs.in_features
    whole = width % 16 == 0 and depth % 16 == 0
    if weight.rounding == "int8" and whole and rows >= _LEAST_INT8_ROWS:
        numbers, scales = round_rows(x, torch.int8, weight.input_scale, is_fp8=False)
        stored = (
            slabs.data.view(torch.int8) if slabs.kind == INT8_ROWS else unpack(slabs, torch.int8)
        )
        return scale_product(
            torch._int_mm(numbers, stored.t()), scales, slabs.scales, bias, x.dtype
        )
    if slabs.kind == FP8_ROWS and whole:
        return _fp8_by_library(x, weight, slabs, bias)
    seen, by_rows = weight.seen(x), slabs.kind >= INT8_ROWS
    return _multiply(seen, dequantized(slabs, x.dtype) if by_rows else unpack(slabs, x.dtype), bias)


def _fp8_by_library(
    x: torch.Tensor, weight: Weights, slabs: Slabs, bias: torch.Tensor | None
) -> torch.Tensor:
    stored = slabs.data.view(torch.float8_e4m3fn).t()
    if weight.rounding == "block":
        numbers, scales = fp8_blocks(x)
        y = torch._scaled_mm(
            numbers, stored, scales, slabs.block_scales.t(), out_dtype=torch.bfloat16
        )
        y = y.to(x.dtype)
        return y if bias is None else y.add_(bias)
    numbers, scales = round_rows(x, torch.float8_e4m3fn, weight.input_scale, is_fp8=True)
    outputs = slabs.scales[: slabs.out_features].unsqueeze(0)
    y = torch._scaled_mm(
        numbers, stored, scales.unsqueeze(1), outputs, out_dtype=torch.bfloat16, use_fast_accum=True
    ).to(x.dtype)
    return y if bias is None else y.add_(bias)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return matmul(x, weight, bias) if batch_invariant() else F.linear(x, weight, bias)
