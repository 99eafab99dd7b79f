"""Quantized tensors from a checkpoint, collected for the layer that joins them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from .weight_map import FusedPart, Placement, Region

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quantizer import LayerSpec, ParameterSpec, Quantizer
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's share of a dimension: the index-th of `count` equal pieces."""

    index: int = 0
    count: int = 1

    def of(self, size: int) -> slice:
        """The share of a dimension of that size."""
        width = size // self.count
        return slice(self.index * width, (self.index + 1) * width)


WHOLE = Piece()


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One quantized checkpoint matrix: its prefix, its outputs on this rank, this rank's share."""

    name: str
    rows: int
    piece: Piece = WHOLE


class StoredLayer:
    """Announces the tensors of a layer's parts; when all have arrived, calls `done` with them,
    joined.

    `spec` is the whole layer's. Joined names (qkv_proj.weight, gate_up_proj.weight_scale) are
    announced in addition to those of the parts; `names` are their prefixes.
    """

    def __init__(
        self,
        build: ModelBuilder,
        quantizer: Quantizer,
        spec: LayerSpec,
        parts: Sequence[StoredPart],
        done: Callable[[dict[str, Tensor]], None],
        names: Sequence[str] = (),
    ) -> None:
        self._build, self._done = build, done
        self._arrived: dict[str, list[Tensor | None]] = {}
        self._dims: dict[str, int | None] = {}
        self._outstanding = 0
        has_optional = False
        for number, part in enumerate(parts):
            own = replace(spec, name=part.name, out_features=part.rows, parts=())
            for suffix, parameter in quantizer.parameters(own).items():
                self._arrived.setdefault(suffix, [None] * len(parts))
                self._dims[suffix] = parameter.shard_dim
                self._place(part, number, suffix, parameter)
                has_optional |= parameter.optional
        if len(parts) > 1:
            for suffix in self._dims:
                self._offer_joined(parts, suffix, names)
        if has_optional:
            build.weights.when_loaded(self._finish)

    def _place(self, part: StoredPart, number: int, suffix: str, parameter: ParameterSpec) -> None:
        full, region = _whole(parameter.shape, parameter.shard_dim, part.piece)
        self._outstanding += 1
        self._build.weights.add(
            Placement(
                name=f"{part.name}.{suffix}",
                shape=full,
                region=region,
                accept=partial(self._accept, suffix, number),
                fill="bits" if parameter.dummy is None else parameter.dummy,
                required=not parameter.optional,
                dtype=parameter.dtype,
            )
        )

    def _offer_joined(self, parts: Sequence[StoredPart], suffix: str, names: Sequence[str]) -> None:
        """A checkpoint may join parts along the dimension that ranks divide, or share a tensor."""
        dim, offset, fused = self._dims[suffix], 0, []
        shape: list[int] = []
        for part in parts:
            placed = self._build.weights.placements[f"{part.name}.{suffix}"]
            fused.append(FusedPart(placed.name, offset, dim=dim))
            shape = list(placed.shape)
            if dim is not None:
                offset += placed.shape[dim]
        if dim is not None:
            shape[dim] = offset
        for name in names:
            self._build.weights.add_fused(f"{name}.{suffix}", tuple(shape), fused)

    def _accept(self, suffix: str, number: int, tensor: Tensor) -> None:
        self._arrived[suffix][number] = tensor
        self._outstanding -= 1
        if not self._outstanding:
            self._finish()

    def _finish(self) -> None:
        arrived, self._arrived = self._arrived, {}
        if not arrived:
            return
        xp = self._build.xp
        joined: dict[str, Tensor] = {}
        for suffix, pieces in arrived.items():
            there = [piece for piece in pieces if piece is not None]
            if len(there) < len(pieces):
                continue  # an optional tensor that this checkpoint does not have
            dim = self._dims[suffix]
            if len(there) == 1:
                joined[suffix] = there[0]
            else:
                joined[suffix] = xp.stack(there) if dim is None else xp.cat(there, dim)
        self._done(joined)


def _whole(shape: tuple[int, ...], dim: int | None, piece: Piece) -> tuple[tuple[int, ...], Region]:
    """The shape of the whole tensor and this rank's region of it, from the shape on this rank."""
    full, region = list(shape), [slice(0, size) for size in shape]
    if dim is not None:
        full[dim] *= piece.count
        region[dim] = piece.of(full[dim])
    return tuple(full), tuple(region)
