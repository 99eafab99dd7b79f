"""Packed weights as the products here want them: made once after loading, by every cell's
`prepare`.

Weight-only formats and int4 weights lie as slabs, int8 and fp8 weights with rounded activations row
by row, so that both the kernels here and cuBLAS read them. What neither can read (odd sizes, groups
of 32, any weight on cards but Hopper's) keeps its internal format, which quant_any.py reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F

from . import native
from .quant_layout import (
    CCQ,
    FP8,
    FP8_ROWS,
    INT4,
    INT8,
    INT8_ROWS,
    SLAB_ROWS,
    TURN,
    Slabs,
    pack_codes,
    pack_slabs,
    unpack_codes,
    unpack_slabs,
)
from .quant_round import FP8_BLOCK, Seen, fp8_blocks, round_rows
from .quant_shapes import Chosen, Few, Tile

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight

    from .routing import Order

# How numbers lie, and how activations are rounded: to "int8" or "fp8" by token, to fp8 by "block",
# or not.
_KINDS: Final = {
    "wint8": (INT8, ""),
    "wint8_zp": (INT8, ""),
    "wint4": (INT4, ""),
    "wint4_zp": (INT4, ""),
    "w4a8": (INT4, "int8"),
    "w4a8_static": (INT4, "int8"),
    "wfp8": (FP8, ""),
    "w8a8": (INT8_ROWS, "int8"),
    "w8a8_static": (INT8_ROWS, "int8"),
    "wfp8afp8": (FP8_ROWS, "fp8"),
    "wfp8afp8_static": (FP8_ROWS, "fp8"),
    "block_fp8": (FP8_ROWS, "block"),
    "ccq2": (CCQ, ""),
}
_PIECE: Final = 16  # bytes that a thread loads
WHOLE: Final = 4  # rows that cuBLAS takes together where activations have scales of blocks


@dataclass(slots=True, eq=False)
class Weights:
    """One matrix or one for each expert. Exactly one of `slabs` and `packed` is there."""

    out_features: int
    rounding: str
    input_scale: torch.Tensor | None
    slabs: Slabs | None
    packed: PackedWeight | None

    @property
    def unread(self) -> PackedWeight:
        """The weight in its internal format, where no native kernel reads it."""
        if self.packed is None:
            raise TypeError("this weight is laid out for native kernels")
        return self.packed

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """x as the product sees it, in its own dtype."""
        if self.packed is not None:
            active: torch.Tensor = self.packed.activate(x)
            return active.to(x.dtype)
        numbers, scales = self.round(x)
        return numbers if scales is None else (numbers.float() * scales[:, None]).to(x.dtype)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[(E,) N, K] by plain tensor code."""
        if self.slabs is not None:
            return dequantized(self.slabs, dtype)
        if self.packed is None:
            raise TypeError("a weight is neither laid out nor packed")
        numbers: torch.Tensor = self.packed.dequantize()
        return numbers.to(dtype)

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(x as the product sees it, what rows of the result are multiplied with). Rounded numbers
        of half floats come in float16, which holds them and is what fp8 weights become fastest."""
        if not self.rounding:
            return x, None
        dtype = torch.float32 if x.dtype == torch.float32 else torch.float16
        is_fp8, by_block = self.rounding != "int8", self.rounding == "block"
        return round_rows(x, dtype, self.input_scale, is_fp8=is_fp8, by_block=by_block)

    def numbers(
        self,
        x: torch.Tensor,
        order: Order | None = None,
        into: Order | None = None,
        *,
        by_words: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x as int8 or fp8 numbers, with scales [T], or [T, blocks of 128 inputs] with tokens
        fastest. `order`: that of the rows, of which those without a slot may be left out; `into`:
        the one in which they come out; `by_words`: their inputs as round_rows() says."""
        if self.rounding == "block":
            return fp8_blocks(x, into=into)
        is_fp8 = self.rounding == "fp8"
        dtype = torch.float8_e4m3fn if is_fp8 else torch.int8
        return round_rows(
            x, dtype, self.input_scale, is_fp8=is_fp8, order=order, into=into, by_words=by_words
        )

    def see(self, x: torch.Tensor, shape: Chosen) -> Seen:
        """x as this kernel takes it."""
        rows, to = x.shape[0], self.number_type(shape)
        if to in (None, torch.float16):
            return Seen(*self.round(x), rows, x.dtype)
        if self.rounding == "block":
            return Seen(*fp8_blocks(x, WHOLE if shape is None else 1), rows, x.dtype)
        return Seen(*self.numbers(x), rows, x.dtype)

    def number_type(self, shape: Chosen) -> torch.dtype | None:
        """What activations are rounded to for this kernel; None: they are not. Few rows are read in
        float16, which holds the numbers, many as the matrix units' own int8 and fp8."""
        if not self.rounding or self.slabs is None:
            return None
        lies_by_rows = self.slabs.lies_by_rows
        if shape is None:
            is_stored = lies_by_rows or self.slabs.in_features % 16 == 0
        else:
            is_stored = lies_by_rows and not isinstance(shape, Few | Tile)
        if not is_stored:
            return torch.float16
        return torch.int8 if self.rounding == "int8" else torch.float8_e4m3fn


def prepare(weight: PackedWeight) -> Weights:
    """See the module."""
    kind, rounding = _KINDS[weight.format.name]
    given = weight.tensors.get("input_scale")
    # Experts come with a scale each, of one input.
    input_scale = None if given is None else given.float().reshape(-1).amax().reshape(1)
    if given is not None and bool((given.float() != input_scale).any()):
        return Weights(weight.out_features, rounding, None, None, weight)
    if native_reads() and weight.dtype != "float32" and _fits(weight, kind):
        slabs = _code_slabs(weight, kind) if kind == CCQ else _slabs(weight, kind)
        return Weights(weight.out_features, rounding, input_scale, slabs, None)
    if input_scale is not None:
        weight = replace(weight, tensors={**weight.tensors, "input_scale": input_scale})
    return Weights(weight.out_features, rounding, input_scale, None, weight)


def native_reads() -> bool:
    """Whether the native kernels run on this card; without one, what they would read is tested."""
    return not torch.cuda.is_available() or native.has_wgmma()


def _fits(weight: PackedWeight, kind: int) -> bool:
    """Whether the native kernels can read it: whole 16 bytes, groups of whole turns."""
    if kind == CCQ:
        return weight.in_features % (2 * TURN) == 0
    groups = weight.tensors["scale"].shape[-1]
    has_groups = weight.format.name.startswith("wint") and groups > 1
    if has_groups and (weight.group_size % TURN or weight.in_features % weight.group_size):
        return False
    if kind in (INT8_ROWS, FP8_ROWS):
        return weight.in_features % _PIECE == 0
    return weight.in_features % 8 == 0


def _slabs(weight: PackedWeight, kind: int) -> Slabs:
    rows, count = weight.out_features, weight.in_features
    data = _packed(weight, kind)
    padded = -(-rows // SLAB_ROWS) * SLAB_ROWS
    scale, size, blocks = weight.tensors["scale"].float(), weight.group_size, None
    if weight.format.name == "block_fp8":
        blocks = scale.contiguous()
        scale = torch.repeat_interleave(scale, FP8_BLOCK, -2)[..., :rows, :]
        size = FP8_BLOCK
    zero = weight.tensors.get("zero")
    if scale.shape[-1] == 1 and zero is None:
        outputs = _filled(scale, padded)[..., 0].contiguous()
        return Slabs(kind, rows, count, weight.num_experts, data, outputs, None, 0, blocks)
    # Scales of groups are rounded to the dtype of activations: to fractions of the output's
    # largest.
    outputs = _filled(scale.abs().amax(-1, keepdim=True), padded)[..., 0].contiguous()
    scale = scale / outputs[..., :rows, None]
    if scale.shape[-1] == 1:
        size = -(-count // TURN) * TURN
    parts = [_by_slab(scale, padded)]
    if zero is not None:
        middle = 128.0 if kind == INT8 else 8.0
        parts.append(_by_slab(middle - zero.float(), padded))
    groups = torch.stack(parts, -3)
    return Slabs(kind, rows, count, weight.num_experts, data, outputs, groups, size, blocks)


def _code_slabs(weight: PackedWeight, kind: int) -> Slabs:
    """CCQ: the local scales of a row and the row + 8 share a byte."""
    held, rows = weight.tensors, weight.out_features
    stored, padded = held["weight"], -(-rows // SLAB_ROWS) * SLAB_ROWS
    data = (
        torch.stack([pack_codes(own) for own in stored])
        if weight.num_experts
        else pack_codes(stored)
    )
    local = torch.stack((held["scale"] >> 4, held["scale"] & 15), -2).flatten(-3, -2)
    rows_of = _by_slab(local.transpose(-1, -2), padded)
    groups = (rows_of[..., 0:1] | rows_of[..., 1:2] << 4).unsqueeze(-3).contiguous()
    outputs = _filled(held["super_scale"].float().unsqueeze(-1), padded)[..., 0].contiguous()
    codes = torch.stack((held["code_scale"], held["code_zero"]), -1).float()
    codes = F.pad(codes, (0, 0, 0, padded - rows)).contiguous()
    return Slabs(
        kind, rows, weight.in_features, weight.num_experts, data, outputs, groups, TURN,
        codes=codes,
    )  # fmt: skip


def _packed(weight: PackedWeight, kind: int) -> torch.Tensor:
    """Slabs, or numbers row by row. Expert by expert: packing needs several times the memory."""
    stored: torch.Tensor = weight.tensors["weight"]
    if kind >= INT8_ROWS:
        return stored.view(torch.uint8).contiguous()

    def pack(numbers: torch.Tensor) -> torch.Tensor:
        if kind == INT4:
            numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)
        elif weight.format.name == "wint8_zp":
            numbers = numbers ^ 128
        return pack_slabs(numbers.view(torch.uint8)[..., : weight.in_features], kind).contiguous()

    if not weight.num_experts:
        return pack(stored)
    first = pack(stored[0])
    data = torch.empty((len(stored), *first.shape), dtype=torch.uint8, device=stored.device)
    for expert in range(len(stored)):
        data[expert] = pack(stored[expert])
    return data


def _filled(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """[..., N, G] with rows of ones up to whole slabs."""
    return F.pad(scale, (0, 0, 0, rows - scale.shape[-2]), value=1.0)


def _by_slab(values: torch.Tensor, rows: int) -> torch.Tensor:
    """[..., N, G] to [..., slabs, G, 8, 2]: the row in the low half, the row + 8 in the high
    one."""
    filled = _filled(values, rows)
    shape = (*filled.shape[:-2], rows // SLAB_ROWS, 2, 8, filled.shape[-1])
    return filled.reshape(shape).transpose(-1, -3)


def dequantized(slabs: Slabs, dtype: torch.dtype) -> torch.Tensor:
    """[(E,) N, K] by plain tensor code: where the native kernels cannot run."""
    rows, count = slabs.out_features, slabs.in_features
    if slabs.codes is not None:
        bits = unpack_codes(slabs.data)[..., :rows, : count // 4]
    else:
        bits = slabs.data if slabs.kind >= INT8_ROWS else unpack_slabs(slabs.data, slabs.kind)
        bits = bits[..., :rows, :count].contiguous()
    if slabs.codes is not None:
        scale, zero = slabs.codes[..., :rows, 0:1], slabs.codes[..., :rows, 1:2]
        code = (bits.float() * scale + zero + 0.5).floor().to(torch.int32)
        numbers = torch.stack([(code >> shift & 63) - 32 for shift in (9, 6, 3, 0)], -1)
        numbers = numbers.flatten(-2).float()
    elif slabs.kind == INT4:
        numbers = bits.float() - 8
    elif slabs.kind in (INT8, INT8_ROWS):
        numbers = bits.view(torch.int8).float()
    else:
        numbers = bits.view(torch.float8_e4m3fn).float()
    if slabs.groups is not None:
        for part in reversed(range(slabs.scaled)):
            table = slabs.groups[..., part, :, :]
            if slabs.codes is not None:
                table = torch.cat((table & 15, table >> 4), -1)
            table = table.float().transpose(-1, -3)
            spread = table.reshape(*table.shape[:-4], -1, table.shape[-1])[..., :rows, :]
            spread = torch.repeat_interleave(spread, slabs.group_size, -1)[..., :count]
            numbers = numbers + spread if part else numbers * spread
    return (numbers * slabs.scales[..., :rows, None]).to(dtype)
