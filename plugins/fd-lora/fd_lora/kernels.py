"""The operations `lora` and `lora_experts` in plain tensor code: what other cells are tested
against, and what devices without one run.

    lora(y, x, norm_weight, eps, a, b, ends, slots) -> y

y [T, N] gets b[s] (a[s] x) added in each row whose slot s is 0 or more; other rows stay as they
are, bit for bit. y may be overwritten. x [T, K]; with norm_weight [K] it is rms_norm(x) instead.

A layer that joins P matrices has P adapters side by side: a [S, P * R, K] holds their first halves
one after the other, b [S, N, R] their second ones, and outputs from ends[p - 1] up to ends[p]
belong to part p. Both are zero beyond an adapter's rank, and have y's dtype. slots [T] int32. Sums
are in float32; a x is rounded to y's dtype.

    lora_experts(y, x, a, b, ends, slots, topk_ids, num_experts) -> y

The same for products of routed experts. Row token * k + nth of y [T * k, N] is of the expert
topk_ids[token, nth], topk_ids [T, k] int64; x [T, K], or [T * k, K] where experts' inputs differ.
The matrices of slot s and expert e are a[s * num_experts + e] and b[s * num_experts + e].

A device may have, too, for plain weights [N, K] that no cell prepares:

    adapted_product(
        epilogue, x, norm_weight, eps, weight, bias, residual, a, b, ends, slots) -> y

linear, norm_linear, linear_add (epilogue "add") or gated_linear ("gated": ends [N / 2, N]) with
what lora adds to the product, before the activation. And, to have the norm after a product onto
the residual add what adapters add to that product, in operations that stand in for the norm:

    deferring_add(x, weight, bias, residual, a, b) -> y, or None
    deferred_product(
        epilogue, x, deferred, norm_weight, eps, weight, bias, a, b, ends, slots) -> (y, total)
    deferred_norm(x, deferred, norm_weight, eps, slots) -> (normed, total)

The first is linear_add without what adapters add, or None where they should add it at once, with
adapted_product. The others are adapted_product and rms_norm of total: x with b[s] (a[s] inputs)
added, `deferred` being the inputs, a and b of that product. x may be overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastdeploy_core.tensor import Tensor, namespace

TABLE: Final = {
    "lora": "fd_lora.kernels:lora",
    "lora_experts": "fd_lora.kernels:lora_experts",
}
# Numbers of A and B that are gathered at once.
_MAX_GATHERED: Final = 1 << 24


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


def lora_experts(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ends: Sequence[int],
    slots: Tensor,
    topk_ids: Tensor,
    num_experts: int,
) -> Tensor:
    """See above. Each row is multiplied with matrices of its own, gathered for some rows at a
    time, so that nothing waits for the host."""
    xp, rows, top_k = namespace(y), int(y.shape[0]), topk_ids.shape[1]
    if not rows:
        return y
    if x.shape[0] != rows:
        x = xp.repeat_interleave(x, top_k, 0)
    of_rows = xp.repeat_interleave(slots.to(xp.int64), top_k, 0)
    has_adapter = of_rows >= 0
    numbers = of_rows * num_experts + topk_ids.reshape([-1])
    numbers = xp.where(has_adapter, numbers, xp.zeros_like(numbers))
    step = max(1, _MAX_GATHERED // (a.shape[1] * a.shape[2] + b.shape[1] * b.shape[2]))
    added = []
    for first in range(0, rows, step):
        some = numbers[first : first + step]
        own_a, own_b = xp.index_select(a, 0, some), xp.index_select(b, 0, some)
        inputs = x[first : first + step].to(a.dtype)
        added.append(_own_product(xp, inputs, own_a, own_b, ends))
    return xp.where(has_adapter.unsqueeze(1), y + xp.cat(added, 0).to(y.dtype), y)


def _own_product(xp: Any, x: Tensor, a: Tensor, b: Tensor, ends: Sequence[int]) -> Tensor:
    """[n, N]: row i of x times a[i] and b[i]."""
    rank, added, start = b.shape[2], [], 0
    inner = xp.matmul_nt(x.unsqueeze(1), a)
    for part, end in enumerate(ends):
        own = inner[:, :, part * rank : (part + 1) * rank]
        added.append(xp.matmul_nt(own, b[:, start:end]).squeeze(1))
        start = end
    return xp.cat(added, -1)


def _slots(slots: Tensor, count: int) -> Sequence[int]:
    place: Any = getattr(slots, "device", None) or slots.place
    if "cpu" not in str(place).lower():
        return range(count)
    return sorted({slot for slot in slots.tolist() if slot >= 0})
