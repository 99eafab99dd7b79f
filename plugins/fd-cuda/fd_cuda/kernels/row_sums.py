"""A x of few rows, before the product's launch: by row, after the norm where there is one."""

from __future__ import annotations

import ctypes
import functools

import torch

from . import native
from .common import cdiv
from .norm import rms_norm

_MOST_READ = 1 << 24  # numbers of A that all rows read, each its own
_MOST_WARPS, _MOST_SPLITS, _MOST_RANK = 24, 12, 64
_LINE = 256  # inputs that a warp reads at once, of eight ranks


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
    device, is_half = torch.cuda.current_device(), x.dtype == torch.float16
    sizes = (num_slots, rank, parts, width, share, warps)
    native.launch(
        _kernel(device, sizes, is_half=is_half, has_norm=has_norm),
        (num_rows, parts * splits, 1),
        warps * 32,
        [x, ctypes.c_longlong(x.stride(0)), norm_weight, a, slots, y, inner, num_rows, float(eps)],
    )
    return y, inner


@functools.cache
def _kernel(
    device: int, sizes: tuple[int, ...], *, is_half: bool, has_norm: bool
) -> native.Function:
    slots, rank, parts, width, share, warps = sizes
    return native.function("row_sums", {
        "HALF": int(is_half), "NORM": int(has_norm), "SLOTS": slots, "RANK": rank, "PARTS": parts,
        "WIDTH": width, "SHARE": share, "WARPS": warps,
    })  # fmt: skip
