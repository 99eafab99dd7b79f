"""From full precision to numbers and scales. Input is float32 [N, K], output in the internal
layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.quant_formats import (
    FP8_BLOCK,
    FP8_BOUND,
    INT4_OFFSET,
    INT8_BOUND,
    TINY,
    pack_int4,
)
from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

NUMBERS_AT_ONCE = 1 << 20  # weights per search for the best clip
# Clips to try when a group is rounded to 16 levels: fractions of its largest magnitude.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
INT4_BOUND = 7.0


def _groups(weight: Tensor, group_size: int) -> Tensor:
    """[N, K] to [N, G, g], the last group padded with zeros; group_size 0 is one group."""
    xp = namespace(weight)
    rows, count = weight.shape
    size = group_size or count
    padding = -count % size
    if padding:
        zeros = xp.zeros([rows, padding], dtype=xp.float32, device=weight.device)
        weight = xp.cat((weight, zeros), 1)
    return weight.reshape([rows, (count + padding) // size, size])


def _nonzero(scale: Tensor) -> Tensor:
    """Scales of all-zero groups become 1: a scale of zero would mean a damaged checkpoint."""
    xp = namespace(scale)
    return xp.where(scale > TINY, scale, xp.ones(list(scale.shape), device=scale.device))


def quantize_int8(weight: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """([N, K] int8, scales [N, G] float32), symmetric, by the largest magnitude."""
    xp = namespace(weight)
    rows, count = weight.shape
    groups = _groups(weight.float(), group_size)
    scale = _nonzero(groups.abs().amax(dim=-1, keepdim=True) / INT8_BOUND)
    numbers = (groups / scale).round().clamp(-INT8_BOUND, INT8_BOUND).to(xp.int8)
    return numbers.reshape([rows, -1])[:, :count].contiguous(), scale.squeeze(-1)


def quantize_int4(weight: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """([N, ceil(K/2)] uint8, scales [N, G] float32), symmetric, with the clip of the least
    error."""
    # A few rows at a time: every clip rereads them, from the processor's cache if they are few.
    rows = max(1, NUMBERS_AT_ONCE // int(weight.shape[1]))
    parts = [
        _quantize_rows(weight[first : first + rows], group_size)
        for first in range(0, int(weight.shape[0]), rows)
    ]
    if len(parts) == 1:
        return parts[0]
    xp = namespace(weight)
    packed, scales = zip(*parts, strict=True)
    return xp.cat(list(packed), 0), xp.cat(list(scales), 0)


def _quantize_rows(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    scale = int4_scale(_groups(weight.float(), group_size)).squeeze(-1)
    return pack_with_scale(weight, scale, group_size), scale


def int4_scale(groups: Tensor) -> Tensor:
    """Scales [N, G, 1] of groups [N, G, g]: for each group the clip with the least squared
    error."""
    xp = namespace(groups)
    peak = _nonzero(groups.abs().amax(dim=-1, keepdim=True))
    best_error: Tensor | None = None
    best = peak
    for clip in CLIPS:
        scale = peak * (clip / INT4_BOUND)
        rounded = (groups / scale).round().clamp(-INT4_OFFSET, INT4_BOUND) * scale
        off = rounded - groups
        error = (off * off).sum(dim=-1, keepdim=True)
        if best_error is None:
            best_error, best = error, scale
            continue
        better = error < best_error
        best_error = xp.where(better, error, best_error)
        best = xp.where(better, scale, best)
    return best


def pack_with_scale(weight: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """Nearest int4 numbers under given scales [N, G], packed."""
    xp = namespace(weight)
    rows, count = weight.shape
    groups = _groups(weight.float(), group_size)
    numbers = (groups / scale.float().unsqueeze(-1)).round().clamp(-INT4_OFFSET, INT4_BOUND)
    shifted = (numbers + INT4_OFFSET).to(xp.uint8).reshape([rows, -1])[:, :count]
    return pack_int4(shifted.contiguous())


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """([N, K] float8_e4m3fn, scales [N, 1] float32)."""
    xp = namespace(weight)
    wide = weight.float()
    scale = _nonzero(wide.abs().amax(dim=-1, keepdim=True) / FP8_BOUND)
    return (wide / scale).clamp(-FP8_BOUND, FP8_BOUND).to(xp.float8_e4m3fn), scale


def quantize_block_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """([N, K] float8_e4m3fn, scales [ceil(N/128), ceil(K/128)] float32)."""
    xp = namespace(weight)
    rows, count = weight.shape
    padding = -rows % FP8_BLOCK
    wide = weight.float()
    if padding:
        zeros = xp.zeros([padding, count], dtype=xp.float32, device=wide.device)
        wide = xp.cat((wide, zeros), 0)
    groups = _groups(wide, FP8_BLOCK)  # [N', K/128, 128]
    blocks = groups.reshape([(rows + padding) // FP8_BLOCK, FP8_BLOCK, groups.shape[1], FP8_BLOCK])
    peak = blocks.abs().amax(dim=3).amax(dim=1)
    scale = _nonzero(peak / FP8_BOUND)
    numbers = blocks / scale.unsqueeze(1).unsqueeze(3)
    flat = numbers.reshape([rows + padding, -1])[:rows, :count]
    return flat.clamp(-FP8_BOUND, FP8_BOUND).to(xp.float8_e4m3fn), scale
