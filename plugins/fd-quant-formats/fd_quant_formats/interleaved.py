"""The layout in which FastDeploy 2.x stores int8 and int4 weights: Paddle's weight_quantize for
tensor cores of 2020 and later.

int8 [N, K] or, two to a byte, [N / 2, K]. Rows of K are permuted in groups of 16 (int8) or 32
(int4), 2 or 4 outputs are interleaved in tiles of 64 inputs, values are offset to be unsigned, and
the values of a 32-bit word are shuffled. This module undoes it once, at load time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fastdeploy_core.contracts.quant_formats import unpack_int4
from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

TILE: Final = 64  # consecutive inputs of one output


def outputs_together(bits: int) -> int:
    """Number of interleaved outputs; a checkpoint can only be cut between such groups."""
    return 16 // bits


def plain_rows(stored: Tensor, bits: int, count: int) -> Tensor:
    """[..., N * bits / 8, K] int8 as stored to [..., N, K] uint8, offset by 2^(bits-1)."""
    xp = namespace(stored)
    lead = list(stored.shape[:-2])
    rows = stored.shape[-2] * 8 // bits
    together, per_word = outputs_together(bits), 32 // bits
    raw = stored.contiguous().view(xp.uint8)
    values = raw if bits == 8 else unpack_int4(raw, 2 * raw.shape[-1])
    # Words hold even places first; in int8 only the two middle places are swapped.
    places = [0, 2, 1, 3] if bits == 8 else [0, 2, 4, 6, 1, 3, 5, 7]
    words = values.reshape([-1, per_word])
    values = _take_columns(words, np.argsort(places))
    tiled = values.reshape([-1, rows // together, count // TILE, together, TILE])
    values = tiled.transpose(2, 3).reshape([-1, rows * count])
    group = 128 // bits
    place = np.arange(group)
    source = 8 * (place % per_word // 2) + place % 2 + 2 * (place // per_word)
    values = _take_columns(values.reshape([-1, group]), np.argsort(source))
    return values.reshape([*lead, rows, count])


def _take_columns(x: Tensor, columns: np.ndarray) -> Tensor:
    xp = namespace(x)
    index = xp.to_device(xp.from_numpy(columns.astype(np.int64)), x.device)
    return xp.index_select(x, 1, index)
