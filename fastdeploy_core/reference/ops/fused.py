"""Fused operations as compositions of a table's own kernels, for devices without a fused kernel.
Each function takes the table and returns the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

Composed = Callable[..., Any]


def norm_linear(kernels: KernelTable) -> Composed:
    """linear of rms_norm(x)."""
    norm, linear = kernels["rms_norm"], kernels["linear"]

    def run(
        x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return linear(norm(x, norm_weight, eps), weight, bias)

    return run


def gated_linear(kernels: KernelTable) -> Composed:
    """silu_and_mul of linear of rms_norm(x); without a norm weight, of x itself."""
    norm, linear = kernels["rms_norm"], kernels["linear"]
    activation = kernels["silu_and_mul"]

    def run(
        x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        normed = x if norm_weight is None else norm(x, norm_weight, eps)
        return activation(linear(normed, weight, bias))

    return run


def linear_add(kernels: KernelTable) -> Composed:
    """residual + linear(x); the residual is not changed."""
    linear = kernels["linear"]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        return residual + linear(x, weight, bias)

    return run


def qk_norm(kernels: KernelTable) -> Composed:
    """rms_norm of every query head and of every key head; q and k are not changed."""
    norm = kernels["rms_norm"]

    def run(
        q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norm(q, q_weight, eps), norm(k, k_weight, eps)

    return run


def concat_rms_norm(kernels: KernelTable) -> Composed:
    """rms_norm of x and of y, side by side."""
    norm = kernels["rms_norm"]

    def run(x: Tensor, x_weight: Tensor, y: Tensor, y_weight: Tensor, eps: float) -> Tensor:
        return namespace(x).cat((norm(x, x_weight, eps), norm(y, y_weight, eps)), -1)

    return run


def linear_float32(kernels: KernelTable) -> Composed:
    """linear in float32 for any dtype of x: small differences decide which experts run."""
    linear = kernels["linear"]

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x.float(), weight, None)

    return run


def linear_logits(kernels: KernelTable) -> Composed:
    """linear, then float32."""
    linear = kernels["linear"]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias).float()

    return run


def greedy_linear(kernels: KernelTable) -> Composed:
    """The likeliest token of each row of linear(x), and its logit; NaN counts as the largest."""
    linear, greedy = kernels["linear"], kernels["greedy"]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = linear(x, weight, bias).float()
        ids = greedy(logits)
        return ids, namespace(x).gather(logits, 1, ids.unsqueeze(1)).squeeze(1)

    return run
