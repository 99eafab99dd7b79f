"""Where each matrix of an adapter goes: this rank's share of it, in which layer, at which place.

A layer may join several modules of the checkpoint (q, k and v; gate and up), whose adapters lie
side by side in it. Some checkpoints hold them as one module; its adapter then has one first half
for all parts, and its second half is cut like the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.layers.linear import joined_names

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.layers.stored import Piece
    from fastdeploy_core.tensor import Tensor

    from .files import AdapterFolder

MAX_NAMED = 5  # modules that a message names


@dataclass(frozen=True, slots=True)
class Slots:
    """The matrices of one layer: a [slots, parts * rank, in_features of this rank], b [slots,
    out_features of this rank, rank]; zero where there is no adapter, and beyond its rank."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Half:
    """A matrix of an adapter on the host, and the rows of a slot's matrix that it fills."""

    slots: Slots
    is_a: bool
    first: int
    matrix: Tensor

    def put(self, number: int, matrix: Tensor) -> None:
        """Copy it, from the device, into a slot."""
        rows, columns = matrix.shape
        whole = self.slots.a if self.is_a else self.slots.b
        whole[number, self.first : self.first + rows, :columns] = matrix


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the matrices that a layer joins."""

    number: int
    first: int  # output of the layer, on this rank
    outputs: int  # in all
    piece: Piece  # this rank's share of them


@dataclass(frozen=True, slots=True)
class _Module:
    """A module that adapters may name."""

    slots: Slots
    parts: Sequence[_Part]
    inputs: int  # in all
    in_piece: Piece

    @property
    def outputs(self) -> int:
        """In all."""
        return sum(part.outputs for part in self.parts)


class Targets:
    """The modules of one model that adapters may change."""

    def __init__(self, device: DeviceBackend, dtype: str, max_rank: int) -> None:
        self._device, self._xp, self._max_rank = device, device.xp, max_rank
        self._dtype = device.xp.dtype(dtype)
        self._modules: dict[str, _Module] = {}
        self.canonical: Callable[[str], str] = str  # a checkpoint's name in the model's spelling

    def add(self, slots: Slots, spec: LayerSpec, pieces: Sequence[Piece], in_piece: Piece) -> None:
        """A layer's modules, as AdapterLayers.layer is given them."""
        starts = accumulate((part.out_features for part in spec.parts), initial=0)
        parts = [
            _Part(number, start, part.out_features * piece.count, piece)
            for number, (start, part, piece) in enumerate(
                zip(starts, spec.parts, pieces, strict=False)
            )
        ]
        inputs = spec.in_features * in_piece.count
        for part, own in zip(spec.parts, parts, strict=True):
            self._modules[part.name] = _Module(slots, [own], inputs, in_piece)
        for name in joined_names(spec.name):
            self._modules.setdefault(name, _Module(slots, parts, inputs, in_piece))

    def halves(self, folder: AdapterFolder) -> list[Half]:
        """This rank's shares of an adapter. InvalidRequest: it does not fit the model."""
        modules = self._check(folder)
        found: list[Half] = []
        for (name, half), stored in folder.weights(self._device).items():
            module, scale = modules[name], folder.modules[name].scale
            if half == "A":
                columns = module.in_piece.of(module.inputs)
                matrix = self._host(stored, (slice(None), columns), 1.0)
                for part in module.parts:
                    first = part.number * self._max_rank
                    found.append(Half(module.slots, True, first, matrix))
                continue
            start = 0
            for part in module.parts:
                own = part.piece.of(part.outputs)
                rows = slice(start + own.start, start + own.stop)
                matrix = self._host(stored, (rows, slice(None)), scale)
                found.append(Half(module.slots, False, part.first, matrix))
                start += part.outputs
        # Kernels multiply other rows of a tile with zero.
        if not all(bool(self._xp.isfinite(half.matrix.float()).all()) for half in found):
            raise InvalidRequest(f"the adapter in {folder.path} has numbers that are not finite")
        return found

    def _host(self, stored: Any, region: tuple[slice, slice], scale: float) -> Tensor:
        """A part of a stored matrix in the model's dtype, scaled before it is rounded."""
        xp = self._xp
        part = xp.from_numpy(np.array(stored.bits()[region]), xp.dtype(stored.dtype))
        return (part.float() * scale).to(self._dtype)

    def _check(self, folder: AdapterFolder) -> dict[str, _Module]:
        """The module that each of the adapter's names means."""
        found: dict[str, _Module] = {}
        missing: list[str] = []
        for name, given in folder.modules.items():
            module = self._modules.get(self.canonical(f"{name}.weight").removesuffix(".weight"))
            if module is None:
                missing.append(name)
                continue
            found[name] = module
            if (given.in_features, given.out_features) != (module.inputs, module.outputs):
                raise InvalidRequest(
                    f"the adapter in {folder.path} is for another model: its {name} has "
                    f"{given.in_features} inputs and {given.out_features} outputs, here it has "
                    f"{module.inputs} and {module.outputs}"
                )
            if given.rank > self._max_rank:
                raise InvalidRequest(
                    f"the adapter in {folder.path} has rank {given.rank}; possible: up to "
                    f"--max-lora-rank {self._max_rank}"
                )
        if missing:
            raise InvalidRequest(self._refusal(folder, missing))
        if len({id(m) for m in found.values()}) < len(found):
            raise InvalidRequest(f"the adapter in {folder.path} names a module twice")
        return found

    def _refusal(self, folder: AdapterFolder, missing: list[str]) -> str:
        kinds = sorted({name.rpartition(".")[2] for name in self._modules})
        named = ", ".join(missing[:MAX_NAMED])
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        why = ""
        if any(".experts" in name for name in missing):
            why = "; routed experts are multiplied by a driver that knows no adapters"
        elif any(name.endswith(("embed_tokens", "lm_head")) for name in missing):
            why = "; embedding and head are shared by all adapters"
        return (
            f"the adapter in {folder.path} changes {named}{more}, which adapters cannot change "
            f"here{why}; possible: {', '.join(kinds)}"
        )
