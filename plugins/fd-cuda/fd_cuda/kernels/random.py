"""The counter-based random numbers of op "sample", bit for bit as the reference computes them:
integer arithmetic modulo 2^64 with arithmetic shifts (fastdeploy_core/reference/random.py says
why)."""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
MIX_3 = tl.constexpr(0xFF51AFD7ED558CCD - (1 << 64))
MIX_4 = tl.constexpr(0xC4CEB9FE1A85EC53 - (1 << 64))
INDEX_STEP = tl.constexpr(0xD1342543DE82EF95 - (1 << 64))
INDEX_START = tl.constexpr(0x2545F4914F6CDD1D)
SCALE = tl.constexpr(2.0**-40)
LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, position):
    """What a row's numbers depend on; both int64."""
    return _mix(_mix(seed + GOLDEN) + position * GOLDEN)


@triton.jit
def log_exponential(key, index):
    """The logarithm of an Exp(1) number for each index (int64)."""
    x = _mix(index * INDEX_STEP + INDEX_START) ^ key
    x = x * MIX_3
    x = x ^ (x >> 32)
    x = x * MIX_4
    # The upper 40 bits as a float, rounded once; 64-bit integers are slow to convert.
    low = ((x >> 24) & 0xFFFFFF).to(tl.int32).to(tl.float32)
    high = ((x >> 48) & 0xFFFF).to(tl.int32).to(tl.float32)
    bits = high * 16777216.0 + low
    uniform = tl.minimum((bits + 0.5) * SCALE, LARGEST_BELOW_ONE)
    # log1p(-u) without losing small u: the rounding of 1 - u is divided out again (W. Kahan).
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, -1.0, rest - 1.0)
    log1p = tl.where(rest == 1.0, -uniform, tl.log(rest) * (-uniform / lost))
    return tl.log(-log1p)
