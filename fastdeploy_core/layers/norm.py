"""Normalisation: by the root mean square, alone or fused with the residual sum before it, or over
channels that ranks divide; and LayerNorm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .stored import Piece
from .weight_map import Placement

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder


class RMSNorm:
    """x / rms(x) * weight over the last dimension. Every rank holds the whole weight."""

    def __init__(self, build: ModelBuilder, name: str, size: int, eps: float) -> None:
        self.weight = build.zeros((size,), build.xp.dtype(build.dtype))
        self.eps = eps
        self._norm, self._add_norm = build.kernels["rms_norm"], build.kernels["add_rms_norm"]
        accept = partial(LayerNorm._accept, self.weight)
        place = Placement(f"{name}.weight", (size,), (slice(0, size),), accept, fill=1.0)
        build.weights.add(place)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size], model dtype."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); both [num_tokens, size]. None: nothing to add."""
        if residual is None:
            return self._norm(x, self.weight, self.eps), x
        both: tuple[Tensor, Tensor] = self._add_norm(x, residual, self.weight, self.eps)
        return both


class DividedRMSNorm:
    """RMSNorm over all channels of a column layer, of which each rank has `piece`. Ranks that hold
    the same channels hold them equally often, so their common mean is the mean."""

    def __init__(self, build: ModelBuilder, name: str, size: int, eps: float, piece: Piece) -> None:
        self.size, self.eps = size // piece.count, eps
        self.weight = build.zeros((self.size,), build.xp.dtype(build.dtype))
        self._build, self._norm = build, build.kernels["rms_norm"]
        accept = partial(LayerNorm._accept, self.weight)
        build.weights.add(Placement(f"{name}.weight", (size,), (piece.of(size),), accept, fill=1.0))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, heads of this rank, dim], model dtype; so is the result."""
        build, shape = self._build, x.shape
        x = x.reshape(shape[0], self.size)
        if build.tp_size == 1:
            return self._norm(x.contiguous(), self.weight, self.eps).reshape(shape)
        wide = x.float()
        total = build.all_reduce((wide * wide).sum(dim=-1, keepdim=True))
        mean = total / (self.size * build.tp_size)
        normed = (wide * build.xp.rsqrt(mean + self.eps)).to(x.dtype)
        return (normed * self.weight).reshape(shape)


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension. Every rank holds the
    whole weight."""

    def __init__(
        self, build: ModelBuilder, name: str, size: int, eps: float, *, bias: bool = True
    ) -> None:
        dtype = build.xp.dtype(build.dtype)
        self.weight, self.eps = build.zeros((size,), dtype), eps
        self.bias: Tensor | None = build.zeros((size,), dtype) if bias else None
        self._xp = build.xp
        for part, held, fill in (("weight", self.weight, 1.0), ("bias", self.bias, 0.0)):
            if held is not None:
                build.weights.add(
                    Placement(
                        f"{name}.{part}",
                        (size,),
                        (slice(0, size),),
                        partial(self._accept, held),
                        fill=fill,
                    )
                )

    @staticmethod
    def _accept(held: Tensor, tensor: Tensor) -> None:
        held[:] = tensor.to(held.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size], model dtype."""
        return self._xp.layer_norm(x, self.weight, self.bias, self.eps)
