"""Operations of the model body: embedding, linear, norms, gated activation, rotary embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight. input_ids [T] int64, weight [V, H]: [T, H]."""
    return namespace(weight).index_select(weight, 0, input_ids)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N]."""
    return namespace(x).linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] over its root mean square, times weight [H]; computed in float32."""
    return namespace(x).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum s = x + residual, normed: (rms_norm(s), s), both [T, H]. x and residual stay."""
    total = x + residual
    return namespace(x).rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2I], gate half then up half: silu(gate) * up, [T, I]."""
    return namespace(x).silu_and_mul(x)


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [T, H] named by the index [n] int64: [n, H]. Padding entries are zeros, which
    select row 0 again."""
    return namespace(x).index_select(x, 0, index)


def rotary_embedding(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate the first R dimensions of each head by its token's angle; the rest passes through.

    q [T, Hq, D], k [T, Hk, D], positions [T] int64, cos_sin [P, R] float32: R / 2 cosines, then as
    many sines. Interleaved pairs are (0, 1), (2, 3)...; otherwise (0, R/2), (1, R/2 + 1)...
    Computed in float32. The results may share one buffer, so they may be non-contiguous.
    """
    xp = namespace(q)
    num_heads, width = q.shape[1], q.shape[2]
    rotated = cos_sin.shape[1]
    angles = xp.index_select(cos_sin, 0, positions).unsqueeze(1)
    # One pass over queries and keys together needs half the calls.
    both = xp.cat((q, k), 1)
    head = both if rotated == width else both[:, :, :rotated]
    turned = xp.rotate(
        head, angles[:, :, : rotated // 2], angles[:, :, rotated // 2 :], interleaved
    )
    if rotated != width:
        turned = xp.cat((turned, both[:, :, rotated:]), 2)
    return turned[:, :num_heads], turned[:, num_heads:]
