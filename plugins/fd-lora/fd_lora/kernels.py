"""The operation `lora` in plain tensor code: what other cells are tested against, and what devices
without one run.

    lora(y, x, norm_weight, eps, a, b, ends, slots) -> y

y [T, N] gets b[s] (a[s] x) added in each row whose slot s is 0 or more; other rows stay as they
are, bit for bit. y may be overwritten. x [T, K]; with norm_weight [K] it is rms_norm(x) instead.

A layer that joins P matrices has P adapters side by side: a [S, P * R, K] holds their first halves
one after the other, b [S, N, R] their second ones, and outputs from ends[p - 1] up to ends[p]
belong to part p. Both are zero beyond an adapter's rank, and have y's dtype. slots [T] int32. Sums
are in float32; a x is rounded to y's dtype.

A device may have, too, for plain weights [N, K] that no cell prepares:

    adapted_product(
        epilogue, x, norm_weight, eps, weight, bias, residual, a, b, ends, slots) -> y

linear, norm_linear, linear_add (epilogue "add") or gated_linear ("gated": ends [N / 2, N]) with
what lora adds to the product, before the activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastdeploy_core.tensor import Tensor, namespace

TABLE: Final = {"lora": "fd_lora.kernels:lora"}


def lora(
    y: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    a: Tensor,
    b: Tensor,
    ends: Sequence[int],
    slots: Tensor,
) -> Tensor:
    """See above. Where the host can see the slots, those without rows are left out; a device that
    captures steps computes all of them, since it must not wait for the host."""
    if not y.shape[0]:
        return y
    xp = namespace(y)
    x = x if norm_weight is None else xp.rms_norm(x, norm_weight, eps)
    rank = a.shape[1] // len(ends)
    for slot in _slots(slots, int(a.shape[0])):
        inner = xp.linear(x.to(a.dtype), a[slot])
        added, start = [], 0
        for part, end in enumerate(ends):
            own = inner[:, part * rank : (part + 1) * rank]
            added.append(xp.linear(own, b[slot][start:end]))
            start = end
        more = added[0] if len(added) == 1 else xp.cat(added, -1)
        y = xp.where((slots == slot).unsqueeze(1), y + more.to(y.dtype), y)
    return y


def _slots(slots: Tensor, count: int) -> Sequence[int]:
    place: Any = getattr(slots, "device", None) or slots.place
    if "cpu" not in str(place).lower():
        return range(count)
    return sorted({slot for slot in slots.tolist() if slot >= 0})
