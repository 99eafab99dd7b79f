"""What stands around recurrences and beside experts, in plain tensor code: the definition of three
operations that a device may have kernels of. Each takes many launches of short kernels otherwise,
which is most of a small decode step.

Layers ask `cell`; no table has the plain code, since it is no fallback: most devices run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.tensor import Tensor


def cell(build: ModelBuilder, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The device's kernel of this file's operation, or the operation itself."""
    kernels, name = build.kernels, plain.__name__
    if name in kernels:
        return kernels[name]
    return plain


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    """x over its root mean square along the last dimension, times weight, and silu(gate) before or
    after that; in float32, but for the normed x, which is rounded where the weight follows. x,
    gate: [T, heads, n], weight: [n], or [heads, n]."""
    xp = namespace(x)
    wide, opened = x.float(), xp.silu(gate.float())
    wide = wide * opened if gate_first else wide
    normed = wide * xp.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
    y = weight * normed.to(x.dtype)
    return y if gate_first else (y.float() * opened).to(x.dtype)


def add_gated(total: Tensor | None, gate: Tensor, y: Tensor) -> Tensor:
    """total + sigmoid(gate) * y. y and total: [T, n]; gate: [T, heads, n / heads], or [T, 1, 1],
    one of all outputs."""
    (tokens, width), heads = y.shape, gate.shape[1]
    parts = y.reshape([tokens, heads, width // heads])
    added: Tensor = (namespace(y).sigmoid(gate) * parts).reshape(y.shape)
    return added if total is None else total + added


def regroup(x: Tensor, groups: int, sizes: Sequence[int]) -> Tensor:
    """The outputs of a product whose rows stand in groups, each with so many of every part: all of
    the first part, then all of the next. x: [T, groups * sum(sizes)]; so is the result."""
    xp, tokens = namespace(x), x.shape[0]
    parts = xp.split(x.reshape([tokens, groups, sum(sizes)]), list(sizes), -1)
    shapes = [[tokens, groups * size] for size in sizes]
    joined: Tensor = xp.cat([p.reshape(s) for p, s in zip(parts, shapes, strict=True)], -1)
    return joined
