"""Recurrences over states [key, value] in plain tensor code: the definition of what
fastdeploy_core/contracts/attention.py names.

All numbers are float32. T tokens, H heads, key width K, value width V; G is 1, or K where each row
of a state fades by itself. Of each head

    S <- e^g S + k new^T;  o = S^T q      new: x (Mamba-2), or b (v - (e^g S)^T k) (gated delta net)

where S on the right side of o is the new state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

CHUNK = 32  # tokens whose products are computed at once


def softplus(xp: Any, x: Tensor) -> Tensor:
    """log(1 + e^x), also of large x."""
    return xp.maximum(x, xp.zeros_like(x)) + xp.log1p(xp.exp(-xp.abs(x)))


def unit(xp: Any, x: Tensor) -> Tensor:
    """Vectors of length 1 along the last dimension; a small number keeps zeros finite."""
    return x * xp.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def convolve(both: Tensor, weight: Tensor, bias: Tensor | None, length: int) -> Tensor:
    """Causal, one filter per channel: [rows, length, C]. both: [rows, W - 1 + length, C], inputs
    after those before them; weight: [C, W], the newest input's last."""
    width = int(weight.shape[1])
    y = both[:, :length] * weight[:, 0]
    for i in range(1, width):
        y = y + both[:, i : i + length] * weight[:, i]
    return y if bias is None else y + bias


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token of each row: (o [R, H, V], the next states [R, H, K, V]). q, k: [R, H, K];
    v: [R, H, V]; g: [R, H, G], at most 0; b: [R, H], or None: v comes as it is added."""
    state = state * g.exp().unsqueeze(-1)
    new = v
    if b is not None:
        new = (v - (state * k.unsqueeze(-1)).sum(dim=-2)) * b.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * new.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(dim=-2), state


def causal(device: DeviceBackend) -> Tensor:
    """[2, CHUNK, CHUNK] float32: 1 where a token sees another or itself, and another alone."""
    seen = np.tril(np.ones((CHUNK, CHUNK), np.float32))
    return device.to_device(np.stack((seen, np.tril(seen, -1))))


class Chunks:
    """Some tokens of one sequence, cut into chunks of its positions: the products within all chunks
    are computed at once, then the state passes through them one by one.

    Cuts are at multiples of CHUNK from the sequence's beginning. Places of no token, in front of
    the first and after the last, have k = 0 and g = 0 and leave the state as it is.
    """

    def __init__(self, device: DeviceBackend, seen: Tensor, count: int, start: int) -> None:
        """count tokens; the sequence had `start` before them. seen: of causal()."""
        self._xp, self._device, self._seen = device.xp, device.device, seen
        before = start % CHUNK
        self.num_chunks = -(-(before + count) // CHUNK)
        self._places = slice(before, before + count)

    def _cut(self, x: Tensor) -> Tensor:
        """[T, H, D] to [chunks, H, CHUNK, D], zeros where there is no token."""
        xp, size, (_, heads, width) = self._xp, self.num_chunks * CHUNK, x.shape
        whole = xp.zeros([size, heads, width], dtype=x.dtype, device=self._device)
        whole[self._places] = x
        return whole.reshape([self.num_chunks, CHUNK, heads, width]).transpose(1, 2)

    def scan(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(o [T, H, V], the state after the last token [H, K, V]); arguments as `step` has them, T
        tokens in place of R rows, with one state."""
        xp, (seen, earlier) = self._xp, self._seen
        q, k, v = self._cut(q), self._cut(k), self._cut(v)
        c = xp.cumsum(self._cut(g), 2)  # [chunks, H, CHUNK, G]: decay up to a token
        inner = _faded_products(xp, q, k, c) * seen
        grown = xp.exp(c)
        update, wrong = v, None
        if b is not None:
            b = self._cut(b.unsqueeze(-1))
            system = b * _faded_products(xp, k, k, c) * earlier
            both = solve(xp, system, xp.cat([b * v, b * grown * k], -1))
            update, wrong = both[:, :, :, : v.shape[3]], both[:, :, :, v.shape[3] :]
        last = c[:, :, CHUNK - 1 :]
        faded = (xp.exp(last - c) * k).transpose(2, 3)
        decay, reads = xp.exp(last).transpose(2, 3), grown * q
        found = []
        for i in range(self.num_chunks):
            new = update[i] if wrong is None else update[i] - xp.matmul(wrong[i], state)
            found.append(xp.matmul(reads[i], state) + xp.matmul(inner[i], new))
            state = state * decay[i] + xp.matmul(faded[i], new)
        whole = xp.cat(found, 1).transpose(0, 1)
        return whole[self._places], state


def _faded_products(xp: Any, x: Tensor, k: Tensor, c: Tensor) -> Tensor:
    """[chunks, H, CHUNK, CHUNK]: x_i . e^(c_i - c_j) k_j, right where token i sees token j:
    the exponent is at most 0 there and is cut elsewhere. x, k: [chunks, H, CHUNK, K]; c: [.., G].
    """
    if c.shape[3] == 1:
        pair = xp.exp(xp.clamp(c - c.transpose(2, 3), None, 0.0))
        return xp.matmul(x, k.transpose(2, 3)) * pair
    columns = []
    for j in range(CHUNK):  # all at once would be CHUNK times as large as the keys
        faded = xp.exp(xp.clamp(c - c[:, :, j : j + 1], None, 0.0)) * k[:, :, j : j + 1]
        columns.append((x * faded).sum(dim=-1, keepdim=True))
    return xp.cat(columns, -1)


def solve(xp: Any, lower: Tensor, right: Tensor) -> Tensor:
    """X with (I + lower) X = right; lower [..., n, n] is zero on and above its diagonal. By halves,
    which is as stable as one row after the other."""
    n = int(right.shape[2])
    if n == 1:
        return right
    half = n // 2
    first = solve(xp, lower[:, :, :half, :half], right[:, :, :half])
    rest = right[:, :, half:] - xp.matmul(lower[:, :, half:, :half], first)
    return xp.cat([first, solve(xp, lower[:, :, half:, half:], rest)], 2)
