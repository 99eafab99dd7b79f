"""A x of few rows, before the product's launch: by row, after the norm where there is one. The
norm may first add what the product before left out."""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

from . import native
from .common import cdiv, pad2
from .norm import rms_norm

_MOST_READ = 1 << 24  # numbers of A that all rows read, each its own
_MOST_WARPS, _MOST_SPLITS, _MOST_RANK = 24, 12, 64
_LINE = 256  # inputs that a warp reads at once, of eight ranks
_BEFORE = struct.Struct("@4Pq")
_DEFINES = (
    *("HALF", "NORM", "SUMS", "SLOTS", "RANK", "PARTS", "WIDTH", "SHARE", "WARPS"),
    *("DEFERRED", "DEPTH", "SPLIT"),
)


def splits_of_rows(num_rows: int, ranks: int, rank: int, width: int) -> int:
    """Parts of the inputs that row_sums makes; 0 where a tensor core's launch is faster."""
    if rank % 8 or rank > _MOST_RANK or num_rows * ranks * width > _MOST_READ:
        return 0
    splits = cdiv(width, _MOST_WARPS // (rank // 8) * _LINE)
    return splits if splits <= _MOST_SPLITS else 0


def row_sums(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    a: torch.Tensor,
    rank: int,
    slots: torch.Tensor,
    splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = x, or rms_norm(x), and a[s] y in parts, [splits, T, parts of the product * rank] float32,
    for a [slots, parts * rank, K]; rows without an adapter get no sums. For what native/gemm.cu
    reads, and ranks of eights."""
    if norm_weight is not None and splits > 1:  # no block sees the whole row
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    num_rows, (num_slots, ranks, width) = x.shape[0], a.shape
    has_norm, parts = norm_weight is not None, ranks // rank
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device) if has_norm else x
    inner = torch.empty((splits, num_rows, ranks), dtype=torch.float32, device=x.device)
    share = cdiv(cdiv(width, splits), 8) * 8
    warps = rank // 8 * cdiv(share, _LINE)
    native.launch(
        _kernel((num_slots, rank, parts, width, share, warps), x, has_norm=has_norm),
        (num_rows, parts * splits, 1),
        warps * 32,
        [x, ctypes.c_longlong(x.stride(0)), norm_weight, a, slots, y, inner, num_rows, float(eps)],
    )
    return y, inner


def can_defer(num_rows: int, rank: int, width: int, depth: int) -> bool:
    """Whether deferred_sums adds what adapters add to a product [num_rows, depth] by
    [depth, width]."""
    # One block has a row of the sum, and neighbouring threads divide the ranks of an output.
    return (
        splits_of_rows(num_rows, rank, rank, depth) > 0
        and splits_of_rows(num_rows, rank, rank, width) == 1
        and pad2(rank) == rank
        and width % 8 == 0
    )


def deferred_sums(
    x: torch.Tensor,
    deferred: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm_weight: torch.Tensor,
    eps: float,
    a: torch.Tensor | None,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = rms_norm(total), a[s] y as of row_sums in one part, or in none without a, and total: x
    with b[s] (a'[s] x') added, where `deferred` is (x', a', b). The kernel before lets this one
    start once x' and the slots are there: the product with x', or one that has ended then."""
    inputs, a_before, b = deferred
    (num_rows, width), (num_slots, _, rank) = x.shape, b.shape
    ranks = 2 * rank if a is None else a.shape[1]  # without sums two blocks have a row
    y, total = (torch.empty((num_rows, width), dtype=x.dtype, device=x.device) for _ in range(2))
    inner = torch.empty((int(a is not None), num_rows, ranks), dtype=torch.float32, device=x.device)
    parts, warps = ranks // rank, rank // 8 * cdiv(width, _LINE)
    pointers = (t.data_ptr() for t in (inputs, a_before, b, total))
    kernel = _kernel(
        (num_slots, rank, parts, width, width, warps), x,
        has_norm=True, has_sums=a is not None, depth=inputs.shape[1],
    )  # fmt: skip
    native.launch(
        kernel,
        (num_rows, 1, parts),
        warps * 32,
        [x, ctypes.c_longlong(x.stride(0)), norm_weight, a, slots, y, inner, num_rows, float(eps),
         _BEFORE.pack(*pointers, inputs.stride(0))],
        cluster=parts,
    )  # fmt: skip
    return y, inner, total


def _kernel(
    sizes: tuple[int, ...],
    x: torch.Tensor,
    *,
    has_norm: bool,
    has_sums: bool = True,
    depth: int = 0,
) -> native.Function:
    """depth: of the product before, which left out what adapters add; 0: none did."""
    is_half, is_deferred = x.dtype == torch.float16, depth > 0
    parts = sizes[2]
    modes = (int(is_half), int(has_norm), int(has_sums))
    more = (int(is_deferred), depth, parts if is_deferred else 1)
    return _function(torch.cuda.current_device(), (*modes, *sizes, *more))


@functools.cache
def _function(device: int, values: tuple[int, ...]) -> native.Function:
    return native.function("row_sums", dict(zip(_DEFINES, values, strict=True)))
