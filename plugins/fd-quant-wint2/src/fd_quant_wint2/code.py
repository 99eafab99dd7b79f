"""The tet code: a tail-biting bitshift trellis whose codebook is computed, not stored.

512 weights, 64 outputs by 8 inputs with inputs running fastest, are a ring of 512 * bits bits cut
into 256 symbols of 2 * bits bits; a symbol yields two weights. With x the 16 newest bits, the
newest symbol highest, and b0..b3 the bytes of x * MULTIPLIER mod 2^32, lowest first, each minus
127.5:

    w[2t] = b0 + b1 - b3        w[2t+1] = b1 + b2 + b3

The bytes are what an integer product wants: w[2t] x0 + w[2t+1] x1 = b0 x0 + b1 (x0 + x1) + b2 x1
+ b3 (x1 - x0). The multiplier was searched for; random ones are up to 20 % worse.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.tensor import namespace

from .hadamard import rotate

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.tensor import Tensor

MULTIPLIER: Final = 0x67EDF2EB
STATE_BITS: Final = 16
STRAND: Final = 512
SYMBOLS: Final = STRAND // 2
TILE_ROWS: Final = 64
TILE_COLUMNS: Final = 8
_DEVIATION: Final = 128.0
# How much wider than its source the codebook lies, by bits: measured on a Gaussian source.
SPREAD: Final = {2: 1.03, 3: 1.06, 4: 1.12}


@lru_cache(maxsize=1)
def codebook() -> np.ndarray:
    """[65536, 2] float32: the pair of each state, deviation about 128, exact halves."""
    product = np.arange(1 << STATE_BITS, dtype=np.uint64) * MULTIPLIER & 0xFFFFFFFF
    b = [((product >> (8 * n)) & 255).astype(np.float32) - np.float32(127.5) for n in range(4)]
    return np.stack((b[0] + b[1] - b[3], b[1] + b[2] + b[3]), axis=1)


@lru_cache(maxsize=3)
def scaled_codebook(bits: int) -> np.ndarray:
    """[65536, 2] float32 for a source of unit variance."""
    return codebook() * np.float32(SPREAD[bits] / _DEVIATION)


def words_per_strand(bits: int) -> int:
    """int32 words of one strand."""
    return STRAND * bits // 32


def pack_states(states: np.ndarray, bits: int) -> np.ndarray:
    """[n, 256] states to [n, words] int32: each contributes its newest symbol, lowest bits
    first."""
    width = 2 * bits
    symbols = states.astype(np.uint32) >> (STATE_BITS - width)
    spread = (symbols[..., None] >> np.arange(width, dtype=np.uint32)) & 1
    stream = spread.astype(np.uint8).reshape(len(states), SYMBOLS * width)
    packed = np.packbits(stream, axis=1, bitorder="little")
    return packed.view("<u4").astype(np.uint32).view(np.int32)


@lru_cache(maxsize=3)
def _windows(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each symbol: the word its window begins in, the next one, and the first bit."""
    ring, width = STRAND * bits, 2 * bits
    start = (width * (np.arange(SYMBOLS) + 1) - STATE_BITS) % ring
    words = words_per_strand(bits)
    first = start // 32
    return first, (first + 1) % words, start % 32


def unpack_states(words: Tensor, bits: int) -> Tensor:
    """[n, words] int32 to [n, 256] int64 states."""
    xp = namespace(words)
    first, second, shift = (
        xp.to_device(xp.from_numpy(a.astype(np.int64)), words.device) for a in _windows(bits)
    )
    wide = xp.bitwise_and(words.to(xp.int64), 0xFFFFFFFF)
    low = xp.right_shift(xp.index_select(wide, 1, first), shift)
    high = xp.left_shift(xp.index_select(wide, 1, second), 32 - shift)
    return xp.bitwise_and(xp.bitwise_or(low, high), 0xFFFF)


def decode(words: Tensor, bits: int) -> Tensor:
    """[n, words] int32 to [n, 512] float32 of unit variance, in strand order."""
    xp = namespace(words)
    states = unpack_states(words, bits)
    table = _table(xp, bits, words.device)
    return xp.index_select(table, 0, states.reshape([-1])).reshape([words.shape[0], STRAND])


_tables: dict[tuple[str, int, str], Any] = {}


def _table(xp: Any, bits: int, device: Any) -> Tensor:
    key = (xp.name, bits, str(device))
    if key not in _tables:
        _tables[key] = xp.to_device(xp.from_numpy(scaled_codebook(bits).copy()), device)
    return _tables[key]


def tiles_to_rows(strands: Tensor, rows: int, columns: int) -> Tensor:
    """[N/64, K/8, 512] to [rows, columns], padding cut off."""
    tall, wide = strands.shape[:2]
    tiles = strands.reshape([tall, wide, TILE_ROWS, TILE_COLUMNS]).transpose(1, 2)
    return tiles.reshape([tall * TILE_ROWS, wide * TILE_COLUMNS])[:rows, :columns]


def dequantize(weight: PackedWeight) -> Tensor:
    """[N, K] or [E, N, K] float32, in the rotated space of rotate_inputs."""
    if weight.num_experts:
        xp = namespace(weight.tensors["weight"])
        return xp.stack([weight.expert(e).dequantize() for e in range(weight.num_experts)])
    stored, bits = weight.tensors["weight"], int(weight.format.name[-1])
    tall, wide, words = stored.shape
    strands = decode(stored.reshape([tall * wide, words]), bits).reshape([tall, wide, STRAND])
    rows = tiles_to_rows(strands, weight.out_features, weight.in_features)
    return rows * weight.tensors["scale"].float().unsqueeze(-1)


def rotate_inputs(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [T, K] as the product sees it: signs, then Hadamard transforms; kernels may round the
    result to int8 per token, which adds a thousandth to the error."""
    return rotate(x.float(), weight.tensors["signs"], int(weight.tensors["block"].item()))
