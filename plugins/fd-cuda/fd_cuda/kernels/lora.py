"""The operations `lora` and `adapted_product` of fd-lora: what adapters add to a product, each row
with its own or none.

A first launch computes A x, for all of the layer's parts at once: of few rows each by itself, with
the norm before it (row_sums.py), else by tiles of rows (adapted_rows.py). The product's kernel adds
B A x where the weight is plain and rows are few (native/gemm.cu), else adapted_rows.py does.
Sums are added in one order, so a row does not depend on the others. What adapters add to a product
onto the residual of few rows may be left to the norm after it, which computes it while the product
runs.

Rows are not sorted: a program takes a tile of them and leaves out those with other adapters. It
ends at once where there are none. So nothing that was captured depends on who has which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from . import linear
from .adapted import Adapters, Shape
from .adapted_rows import finish, product, splits_of, sums_of
from .norm import rms_norm
from .row_sums import can_defer, deferred_sums, row_sums, splits_of_rows

# Inputs up to which a product onto a residual takes no longer than the library's and a pass.
_DEEPEST = 3072


def lora(
    y: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    """y [T, N] with b[s] (a[s] x) added in rows of slot s, in its memory where that is possible:
    see fd_lora.kernels."""
    if not y.shape[0]:
        return y
    y = y if y.stride(1) == 1 else y.contiguous()
    x = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    return finish(y, sums_of(x, a, b, tuple(ends), slots), is_gated=False)


def adapted_product(
    epilogue: str,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    """A plain product of x, or of rms_norm(x), with what adapters add to it: "plain"; "add", on top
    of the residual, which may be overwritten; or "gated", silu(gate) * up."""
    (num_slots, ranks, depth), rank, has_norm = a.shape, b.shape[2], norm_weight is not None
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    splits = splits_of_rows(x.shape[0], ranks, rank, depth)
    shape = Shape(num_slots, rank, tuple(ends), splits or splits_of(x, ranks)[0])
    plan = linear.plan_with_adapters(epilogue, x, weight, shape, has_norm=has_norm)
    if plan is not None and splits:
        x, inner = row_sums(x, norm_weight, eps, a, rank, slots, splits)
        adapters = Adapters(b, shape.ends, slots, inner)
        return linear.compute(plan, epilogue, x, None, 0.0, weight, bias, residual, adapters)
    x = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    sums, is_gated = sums_of(x, a, b, shape.ends, slots), epilogue == "gated"
    if plan is not None:
        adapters = Adapters(b, shape.ends, slots, sums.inner)
        return linear.compute(plan, epilogue, x, None, 0.0, weight, bias, residual, adapters)
    deepest = linear.SHALLOW if residual is None else _DEEPEST
    if bias is None and linear.is_fused(x, weight, deepest):
        return product(x, weight, residual, sums, is_gated=is_gated)
    if residual is not None:
        return finish(linear.linear_add(x, weight, bias, residual), sums, is_gated=False)
    return finish(linear.linear(x, weight, bias), sums, is_gated=is_gated)


def deferring_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
) -> torch.Tensor | None:
    """residual + x times weight, for a norm that adds what adapters add; None where they had better
    add it at once."""
    _, width, rank = b.shape
    if a.shape[1] != rank or not can_defer(x.shape[0], rank, width, x.shape[1]):
        return None  # a product of several parts, or one that row_sums.py does not finish
    shape = Shape(1, rank, (width,), 1)
    plan = linear.plan_with_adapters("add", x, weight, shape, has_norm=False)
    if plan is None:
        return None
    plan = replace(plan, is_deferring=True)
    residual = residual if residual.is_contiguous() else residual.contiguous()
    return linear.compute(plan, "add", x, None, 0.0, weight, bias, residual)


def deferred_product(
    epilogue: str,
    x: torch.Tensor,
    deferred: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """adapted_product of rms_norm(total), and total: x with what deferring_add left out."""
    num_rows, (num_slots, ranks, depth), rank = x.shape[0], a.shape, b.shape[2]
    shape = Shape(num_slots, rank, tuple(ends), splits_of_rows(num_rows, ranks, rank, depth))
    plan = None
    if shape.splits == 1:
        plan = linear.plan_with_adapters(epilogue, x, weight, shape, has_norm=True)
    if plan is None:
        normed, total = deferred_norm(x, deferred, norm_weight, eps, slots)
        more = (a, b, ends, slots)
        return adapted_product(epilogue, normed, None, 0.0, weight, bias, None, *more), total
    normed, inner, total = deferred_sums(x, deferred, norm_weight, eps, a, slots)
    adapters = Adapters(b, shape.ends, slots, inner)
    return linear.compute(plan, epilogue, normed, None, 0.0, weight, bias, None, adapters), total


def deferred_norm(
    x: torch.Tensor,
    deferred: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm_weight: torch.Tensor,
    eps: float,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(total), and total as of deferred_product."""
    normed, _, total = deferred_sums(x, deferred, norm_weight, eps, None, slots)
    return normed, total
