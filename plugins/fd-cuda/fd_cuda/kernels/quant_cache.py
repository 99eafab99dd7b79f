"""Writing a quantized cache: `kv_write_<format>` of contracts/kv_formats.py, one program a
token."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from fastdeploy_core.contracts.kv_formats import KV_FORMATS, KVFormat

from .common import join_chain, options, pad2
from .quant_round import round_even, round_fp8

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import KVScales

_LEAST, _MOST = tl.constexpr(1e-7), tl.constexpr(65504.0)
Rows = tuple[torch.Tensor, ...]


@triton.jit
def _number(x, scale, low, BOUND: tl.constexpr, HAS_LOW: tl.constexpr, IS_FP8: tl.constexpr):
    """x / scale as a whole number or one that fp8 holds."""
    if HAS_LOW:
        x -= low
    x = tl.div_rn(x, scale + tl.zeros_like(x))
    x = tl.minimum(tl.maximum(x, 0.0 if HAS_LOW else -BOUND), BOUND)
    return round_fp8(x) if IS_FP8 else round_even(x)


@triton.jit
def _write(
    x_p, cache_p, scales_p, lows_p, slots_p, stride0, stride1,
    v_p, v_cache_p, v_scales_p, v_lows_p, v_stride0, v_stride1, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, HEADS_PAD: tl.constexpr, PAD: tl.constexpr,
    PER_BYTE: tl.constexpr, BOUND: tl.constexpr, IS_STATIC: tl.constexpr, HAS_LOW: tl.constexpr,
    IS_FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's keys, or its values by the second program of a token, where there is one. PAD
    elements of the cache a row: with PER_BYTE 2 the even and the odd inputs of each are loaded."""
    join_chain(PDL)
    if tl.program_id(1) == 1:
        x_p, cache_p, scales_p, lows_p = v_p, v_cache_p, v_scales_p, v_lows_p
        stride0, stride1 = v_stride0, v_stride1
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_p + token)
    if slot >= 0:
        head, at = tl.arange(0, HEADS_PAD), tl.arange(0, PAD)
        BYTES: tl.constexpr = (WIDTH + PER_BYTE - 1) // PER_BYTE
        is_head = head < HEADS
        inside = is_head[:, None] & (at * PER_BYTE < WIDTH)[None, :]
        from_p = x_p + token * stride0 + head[:, None] * stride1 + at[None, :] * PER_BYTE
        x = tl.load(from_p, mask=inside, other=0.0).to(tl.float32)
        other = x
        has_other = inside
        if PER_BYTE == 2:
            has_other = is_head[:, None] & (at * 2 + 1 < WIDTH)[None, :]
            other = tl.load(from_p + 1, mask=has_other, other=0.0).to(tl.float32)
        table = head[:, None] * WIDTH + at[None, :] * PER_BYTE
        row = slot * HEADS + head
        if IS_STATIC:
            scale = tl.load(scales_p + table, mask=inside, other=1.0)
            other_scale, low, other_low = scale, scale, scale
            if PER_BYTE == 2:
                other_scale = tl.load(scales_p + table + 1, mask=has_other, other=1.0)
            if HAS_LOW:
                low = tl.load(lows_p + table, mask=inside, other=0.0)
                other_low = tl.load(lows_p + table + 1, mask=has_other, other=0.0)
        elif HAS_LOW:
            top = tl.max(tl.where(inside, tl.maximum(x, tl.where(has_other, other, x)), -_MOST), 1)
            bottom = tl.min(
                tl.where(inside, tl.minimum(x, tl.where(has_other, other, x)), _MOST), 1
            )
            step = tl.minimum(tl.maximum(tl.div_rn(top - bottom, BOUND), _LEAST), _MOST)
            step, floor = step.to(tl.float16), bottom.to(tl.float16)
            tl.store(scales_p + row * 2, step, mask=is_head)
            tl.store(scales_p + row * 2 + 1, floor, mask=is_head)
            scale, low = step.to(tl.float32)[:, None], floor.to(tl.float32)[:, None]
            other_scale, other_low = scale, low
        else:
            step = tl.div_rn(tl.max(tl.abs(x), 1), BOUND)
            step = tl.minimum(tl.maximum(step, _LEAST), _MOST).to(tl.float16)
            tl.store(scales_p + row, step, mask=is_head)
            scale = step.to(tl.float32)[:, None]
            other_scale, low, other_low = scale, scale, scale
        number = _number(x, scale, low, BOUND, HAS_LOW, IS_FP8)
        if PER_BYTE == 2:
            second = _number(other, other_scale, other_low, BOUND, HAS_LOW, IS_FP8)
            second = tl.where(has_other, second, 0.0)
            number = (number.to(tl.int32) | (second.to(tl.int32) << 4)).to(tl.float32)
        to_p = cache_p + row[:, None] * BYTES + at[None, :]
        tl.store(to_p, number.to(cache_p.dtype.element_ty), mask=inside)


def _write_all(
    kind: KVFormat, rows: Rows, cache: Rows, slots: torch.Tensor, scales: KVScales | None
) -> None:
    """Round rows [T, heads, dim] and store them in their slots; -1 is left out."""
    parts = []
    for index, given in enumerate(rows):
        x = given if given.stride(-1) == 1 else given.contiguous()
        if scales is None:
            table = low = cache[len(rows) + index]
        else:
            table = low = scales.scale[index]
            low = scales.minimum[index] if scales.minimum else low
        parts.append((x, cache[index], table, low))
    if not rows[0].shape[0]:
        return
    # Keys and values of one shape are one launch.
    pairs = [parts] if len({x.shape for x, *_ in parts}) == 1 else [[part] for part in parts]
    for pair in pairs:
        x, numbers, table, low = pair[0]
        v, *of_v = pair[-1]
        tokens, heads, width = x.shape
        _write[(tokens, len(pair))](
            x, numbers, table, low, slots, x.stride(0), x.stride(1), v, *of_v, v.stride(0),
            v.stride(1),
            HEADS=heads, WIDTH=width, HEADS_PAD=pad2(heads), PAD=pad2(kind.width(width)),
            PER_BYTE=kind.per_byte, BOUND=kind.bound, IS_STATIC=scales is not None,
            HAS_LOW=kind.has_minimum, IS_FP8=kind.dtype == "float8_e4m3fn",
            **options(num_warps=4),
        )  # fmt: skip


kv_write_int8 = partial(_write_all, KV_FORMATS["int8"])
kv_write_float8_e4m3fn = partial(_write_all, KV_FORMATS["float8_e4m3fn"])
kv_write_int4_zp = partial(_write_all, KV_FORMATS["int4_zp"])
