"""GGUF's number formats: the layout of a row's numbers in blocks of bytes, and their values.

`decode(raw)` takes raw rows [R, row_bytes] uint8 and returns [R, K] float32, bit for bit
llama.cpp's values: the same float32 products and differences in the same order. `d` and `m` are a
block's scale and minimum; K-formats have further ones for each part of 32 or 16 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

_SUPER: Final = 256  # numbers in a block of a K-format


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`values` numbers in `nbytes` bytes. `bits`: the numpy dtype, for formats without blocks."""

    name: str
    values: int
    nbytes: int
    decode: Callable[[np.ndarray], np.ndarray]
    dtype: str = ""  # the dtype of a plain format


def to_bfloat16(wide: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits (uint16), to the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(wide, np.float32).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    found = rounded.view(np.uint16)[..., 1::2].copy()  # the high halves; no file here is big-endian
    undefined = np.isnan(wide)
    if undefined.any():
        found[undefined] = 0x7FC0
    return found


def _fields(raw: np.ndarray, fields: list[tuple[str, str, int]]) -> dict[str, np.ndarray]:
    """The fields of every block, [R, blocks, width]; halves already as float32."""
    layout = np.dtype([(name, kind, (width,)) for name, kind, width in fields])
    blocks = np.ascontiguousarray(raw).view(layout)
    return {
        name: blocks[name].astype(np.float32) if kind == "<f2" else blocks[name]
        for name, kind, _ in fields
    }


def _flat(numbers: np.ndarray) -> np.ndarray:
    return numbers.reshape(len(numbers), -1)


def _halves(packed: np.ndarray) -> np.ndarray:
    """Low nibbles of all bytes, then their high ones, along the last dimension."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """32 bits in 4 bytes, least significant first, as 0 or 16 for each number."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _f32(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view("<f4")


def _f16(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _bf16(raw: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32)


def _q4_0(raw: np.ndarray) -> np.ndarray:
    block = _fields(raw, [("d", "<f2", 1), ("q", "u1", 16)])
    return _flat(block["d"] * (_halves(block["q"]).astype(np.float32) - 8))


def _q4_1(raw: np.ndarray) -> np.ndarray:
    block = _fields(raw, [("d", "<f2", 1), ("m", "<f2", 1), ("q", "u1", 16)])
    return _flat(block["d"] * _halves(block["q"]).astype(np.float32) + block["m"])


def _q5_0(raw: np.ndarray) -> np.ndarray:
    block = _fields(raw, [("d", "<f2", 1), ("h", "u1", 4), ("q", "u1", 16)])
    numbers = _halves(block["q"]) | _fifth_bits(block["h"])
    return _flat(block["d"] * (numbers.astype(np.float32) - 16))


def _q5_1(raw: np.ndarray) -> np.ndarray:
    block = _fields(raw, [("d", "<f2", 1), ("m", "<f2", 1), ("h", "u1", 4), ("q", "u1", 16)])
    numbers = _halves(block["q"]) | _fifth_bits(block["h"])
    return _flat(block["d"] * numbers.astype(np.float32) + block["m"])


def _q8_0(raw: np.ndarray) -> np.ndarray:
    block = _fields(raw, [("d", "<f2", 1), ("q", "i1", 32)])
    return _flat(block["q"].astype(np.float32) * block["d"])


def _parts_of_32(block: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of the 8 parts of a block of Q4_K and Q5_K: 6 bits each, in 12 bytes, times
    the block's own."""
    packed = block["s"]
    first, second, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale = np.concatenate((first & 63, (high & 15) | ((first >> 6) << 4)), axis=-1)
    minimum = np.concatenate((second & 63, (high >> 4) | ((second >> 6) << 4)), axis=-1)
    return block["d"] * scale.astype(np.float32), block["m"] * minimum.astype(np.float32)


def _nibbles_of_32(packed: np.ndarray) -> np.ndarray:
    """[R, blocks, 128] bytes to [R, blocks, 8, 32]: 32 bytes have two parts, low nibbles first."""
    bytes32 = packed.reshape(*packed.shape[:-1], 4, 32)
    return np.stack((bytes32 & 15, bytes32 >> 4), axis=-2).reshape(*packed.shape[:-1], 8, 32)


def _q4_k(raw: np.ndarray) -> np.ndarray:
    block = _fields(raw, [("d", "<f2", 1), ("m", "<f2", 1), ("s", "u1", 12), ("q", "u1", 128)])
    scale, minimum = _parts_of_32(block)
    numbers = _nibbles_of_32(block["q"]).astype(np.float32)
    return _flat(scale[..., None] * numbers - minimum[..., None])


def _q5_k(raw: np.ndarray) -> np.ndarray:
    block = _fields(
        raw, [("d", "<f2", 1), ("m", "<f2", 1), ("s", "u1", 12), ("h", "u1", 32), ("q", "u1", 128)]
    )
    scale, minimum = _parts_of_32(block)
    bit = np.arange(8, dtype=np.uint8)[:, None]  # of part p, bit p of the 32 bytes
    fifth = ((block["h"][..., None, :] >> bit) & 1) << 4
    numbers = (_nibbles_of_32(block["q"]) | fifth).astype(np.float32)
    return _flat(scale[..., None] * numbers - minimum[..., None])


def _q6_k(raw: np.ndarray) -> np.ndarray:
    block = _fields(raw, [("q", "u1", 128), ("h", "u1", 64), ("s", "i1", 16), ("d", "<f2", 1)])
    scale = block["d"] * block["s"].astype(np.float32)
    # Two halves of 128 numbers: 64 bytes with low nibbles then high ones, 32 bytes with two bits of
    # each number.
    lead = block["q"].shape[:-1]
    low = block["q"].reshape(*lead, 2, 64)
    low = np.concatenate((low & 15, low >> 4), axis=-1).reshape(*lead, 2, 4, 32)
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((block["h"].reshape(*lead, 2, 1, 32) >> shift) & 3) << 4
    numbers = (low | high).astype(np.float32) - 32
    return _flat(scale[..., None] * numbers.reshape(*lead, 16, 16))


FORMATS: Final[dict[int, BlockFormat]] = {
    0: BlockFormat("F32", 1, 4, _f32, "float32"),
    1: BlockFormat("F16", 1, 2, _f16, "float16"),
    30: BlockFormat("BF16", 1, 2, _bf16, "bfloat16"),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", _SUPER, 144, _q4_k),
    13: BlockFormat("Q5_K", _SUPER, 176, _q5_k),
    14: BlockFormat("Q6_K", _SUPER, 210, _q6_k),
}

# Types with a name that are not read, for error messages.
KNOWN_TYPES: Final[dict[int, str]] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def split_q8_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of Q8_0 as numbers [R, K] int8 and a scale for each 32 of them [R, K / 32] float16."""
    blocks = np.ascontiguousarray(raw).view(np.dtype([("d", "<f2"), ("q", "i1", (32,))]))
    return _nonzero(blocks["d"], blocks["q"], 0)


def split_q4_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of Q4_0 as numbers [R, K / 2] uint8, 8 added, the even one in the low nibble, and scales
    as in split_q8_0."""
    blocks = np.ascontiguousarray(raw).view(np.dtype([("d", "<f2"), ("q", "u1", (16,))]))
    numbers = _halves(blocks["q"])
    return _nonzero(blocks["d"], numbers[..., 0::2] | (numbers[..., 1::2] << 4), 0x88)


def _nonzero(scale: np.ndarray, numbers: np.ndarray, zero: int) -> tuple[np.ndarray, np.ndarray]:
    """A block of zeros has scale 0, which elsewhere means damage: it becomes zeros with scale 1."""
    empty = scale == 0
    if empty.any():
        numbers = np.where(empty[..., None], numbers.dtype.type(zero), numbers)
        scale = np.where(empty, np.float16(1), scale)
    return _flat(numbers), np.ascontiguousarray(scale)
