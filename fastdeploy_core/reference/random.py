"""Random numbers as a function of (seed, position, index): no state, no order, no batch.

Integer arithmetic modulo 2^64 in int64, so torch and paddle, and every device, agree bit for bit.
The mixing steps are those of splitmix64 (Steele, Lea and Flood, 2014) and murmur3's finaliser,
with arithmetic shifts, which both libraries have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN: Final = _signed(0x9E3779B97F4A7C15)
_MIX_1: Final = _signed(0xBF58476D1CE4E5B9)
_MIX_2: Final = _signed(0x94D049BB133111EB)
_MIX_3: Final = _signed(0xFF51AFD7ED558CCD)
_MIX_4: Final = _signed(0xC4CEB9FE1A85EC53)
# Indices and keys come from different sequences. If they shared one, some index would cancel the
# key at some position, and that token would win there at any probability.
_INDEX_STEP: Final = _signed(0xD1342543DE82EF95)
_INDEX_START: Final = _signed(0x2545F4914F6CDD1D)
# 40 random bits: few enough for exact arithmetic, and enough to resolve the earliest arrival in a
# vocabulary of any size.
_BITS: Final = 40
_LOW_MASK: Final = (1 << _BITS) - 1
_LARGEST_BELOW_ONE: Final = 1.0 - 2.0**-24


def exponential(xp: Any, seeds: Tensor, positions: Tensor, index: Tensor) -> Tensor:
    """Exp(1) numbers [B, n] float32, never 0 and never infinite.

    seeds, positions [B] int64; index [1, n] or [B, n] int64, 0 or above.
    """
    uniform = xp.clamp(uniforms(xp, seeds, positions, index), None, _LARGEST_BELOW_ONE)
    return -xp.log1p(-uniform)


def uniforms(xp: Any, seeds: Tensor, positions: Tensor, index: Tensor) -> Tensor:
    """Uniform numbers above 0, [B, n] float32, with 24 significant bits however small."""
    bits = random_bits(xp, seeds, positions, index)
    return (bits.to(xp.float32) + 0.5) * 2.0**-_BITS


def random_bits(xp: Any, seeds: Tensor, positions: Tensor, index: Tensor) -> Tensor:
    """40-bit integers, [B, n] int64."""
    device = seeds.device
    golden = _constant(xp, _GOLDEN, device)
    keys = _mix(xp, _mix(xp, seeds + golden) + positions * golden).unsqueeze(1)
    step, start = _constant(xp, _INDEX_STEP, device), _constant(xp, _INDEX_START, device)
    mixed = _mix(xp, index * step + start)
    shape = [keys.shape[0], mixed.shape[1]]
    # The index alone is mixed once for the whole batch; the key is added before two more rounds.
    x = xp.bitwise_xor(mixed.expand(shape), keys.expand(shape))
    x = x * _constant(xp, _MIX_3, device)
    x = xp.bitwise_xor(x, xp.right_shift(x, 32))
    x = x * _constant(xp, _MIX_4, device)
    return xp.bitwise_and(xp.right_shift(x, 64 - _BITS), _LOW_MASK)


def _mix(xp: Any, x: Tensor) -> Tensor:
    x = xp.bitwise_xor(x, xp.right_shift(x, 30)) * _constant(xp, _MIX_1, x.device)
    x = xp.bitwise_xor(x, xp.right_shift(x, 27)) * _constant(xp, _MIX_2, x.device)
    return xp.bitwise_xor(x, xp.right_shift(x, 31))


def _constant(xp: Any, value: int, device: Any) -> Tensor:
    """A tensor, because one library turns a large Python integer into a float."""
    return xp.tensor(np.array([value], dtype=np.int64), device=device)
