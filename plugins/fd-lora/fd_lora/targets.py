"""Where each matrix of an adapter goes: this rank's share of it, in which layer, at which place.

A layer may join several modules of the checkpoint (q, k and v; gate and up), whose adapters lie
side by side in it. Some checkpoints hold them as one module; its adapter then has one first half
for all parts, and its second half is cut like the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.layers.experts import expert_specs
from fastdeploy_core.layers.linear import joined_names
from fastdeploy_core.layers.stored import WHOLE

from .files import DOWN, GATE_UP, stacked_block

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.moe import MoESpec
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.layers.stored import Piece
    from fastdeploy_core.tensor import Tensor

    from .files import AdapterFolder, AdapterModule

MAX_NAMED = 5  # modules that a message names


@dataclass(frozen=True, slots=True)
class Slots:
    """The matrices of one layer: a [slots, parts * rank, in_features of this rank], b [slots,
    out_features of this rank, rank]; zero where there is no adapter, and beyond its rank. Of a
    block of experts each slot has as many matrices as there are experts, one after the other."""

    a: Tensor
    b: Tensor
    num_experts: int = 1

    def clear(self, number: int) -> None:
        """Empty a slot."""
        own = slice(number * self.num_experts, (number + 1) * self.num_experts)
        self.a[own] = 0
        self.b[own] = 0


@dataclass(frozen=True, slots=True)
class Half:
    """Matrices [experts, rows, columns] of an adapter on the host, which experts of a slot they
    are, and the rows of the slot's matrices that they fill."""

    slots: Slots
    is_a: bool
    expert: int
    first: int
    matrix: Tensor

    def put(self, number: int, matrix: Tensor) -> None:
        """Copy them, from the device, into a slot."""
        count, rows, columns = matrix.shape
        start = number * self.slots.num_experts + self.expert
        whole = self.slots.a if self.is_a else self.slots.b
        whole[start : start + count, self.first : self.first + rows, :columns] = matrix


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
    expert: int = 0  # the first that adapters of this module change

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
        self._stacked: dict[str, _Module] = {}  # parameters of all experts of a block
        self.why_no_experts = ""  # after what cannot be changed, in a message
        self.canonical: Callable[[str], str] = str  # a checkpoint's name in the model's spelling

    @property
    def has_experts(self) -> bool:
        """Whether there are routed experts among them."""
        return bool(self._stacked)

    def add(
        self,
        slots: Slots,
        spec: LayerSpec,
        pieces: Sequence[Piece],
        in_piece: Piece,
        expert: int = 0,
    ) -> _Module:
        """A layer's modules, as AdapterLayers.layer is given them. Returns the layer as one."""
        starts = accumulate((part.out_features for part in spec.parts), initial=0)
        parts = [
            _Part(number, start, part.out_features * piece.count, piece)
            for number, (start, part, piece) in enumerate(
                zip(starts, spec.parts, pieces, strict=False)
            )
        ]
        inputs = spec.in_features * in_piece.count
        for part, own in zip(spec.parts, parts, strict=True):
            self._modules[part.name] = _Module(slots, [own], inputs, in_piece, expert)
        joined = _Module(slots, parts, inputs, in_piece, expert)
        for name in joined_names(spec.name):
            self._modules.setdefault(name, joined)
        return joined

    def add_experts(
        self, prefix: str, spec: MoESpec, gate_up: Slots, down: Slots, piece: Piece
    ) -> None:
        """A block's routed experts, as AdapterLayers.experts is given them."""
        for expert in range(gate_up.num_experts):
            first, second = expert_specs(prefix, spec, expert, piece.count)
            first = replace(first, name=f"{prefix}.{expert}.{GATE_UP}")
            second = replace(second, name=f"{prefix}.{expert}.{DOWN}")
            both = (
                self.add(gate_up, first, [piece, piece], WHOLE, expert),
                self.add(down, second, [WHOLE], piece, expert),
            )
            for name, module in zip((GATE_UP, DOWN), both, strict=True):
                self._stacked.setdefault(f"{prefix}.{name}", module)

    def halves(self, folder: AdapterFolder) -> list[Half]:
        """This rank's shares of an adapter. InvalidRequest: it does not fit the model."""
        modules = self._check(folder)
        found: list[Half] = []
        for (name, half), stored in folder.weights(self._device).items():
            module, given = modules[name], folder.modules[name]
            bits = _by_expert(stored.bits(), half, given)
            if half == "A":
                columns = module.in_piece.of(module.inputs)
                matrix = self._host(stored, bits[:, :, columns], 1.0)
                for part in module.parts:
                    first = part.number * self._max_rank
                    found.append(Half(module.slots, True, module.expert, first, matrix))
                continue
            start = 0
            for part in module.parts:
                own = part.piece.of(part.outputs)
                matrix = self._host(
                    stored, bits[:, start + own.start : start + own.stop], given.scale
                )
                found.append(Half(module.slots, False, module.expert, part.first, matrix))
                start += part.outputs
        # Kernels multiply other rows of a tile with zero.
        if not all(bool(self._xp.isfinite(half.matrix.float()).all()) for half in found):
            raise InvalidRequest(f"the adapter in {folder.path} has numbers that are not finite")
        return found

    def _host(self, stored: Any, bits: np.ndarray, scale: float) -> Tensor:
        """A part of stored matrices in the model's dtype, scaled before it is rounded."""
        xp = self._xp
        part = xp.from_numpy(np.array(bits, order="C"), xp.dtype(stored.dtype))
        return (part.float() * scale).to(self._dtype)

    def _check(self, folder: AdapterFolder) -> dict[str, _Module]:
        """The module that each of the adapter's names means."""
        found: dict[str, _Module] = {}
        missing: list[str] = []
        for name, given in folder.modules.items():
            module = self._module(name, given)
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
        claimed = [
            (id(module.slots), expert, part.number)
            for name, module in found.items()
            for expert in range(
                module.expert, module.expert + (folder.modules[name].num_experts or 1)
            )
            for part in module.parts
        ]
        if len(set(claimed)) < len(claimed):
            raise InvalidRequest(f"the adapter in {folder.path} names a module twice")
        return found

    def _module(self, name: str, given: AdapterModule) -> _Module | None:
        """The module that an adapter's name means."""
        block = stacked_block(name)
        own = self.canonical(f"{block or name}.weight").removesuffix(".weight")
        if not block:
            return self._modules.get(own)
        module = self._stacked.get(f"{own}.{given.parameter}")
        if module is not None and given.num_experts != module.slots.num_experts:
            raise InvalidRequest(
                f"an adapter is for another model: its {name} has {given.num_experts} experts, "
                f"here there are {module.slots.num_experts}"
            )
        return module

    def _refusal(self, folder: AdapterFolder, missing: list[str]) -> str:
        kinds = sorted({name.rpartition(".")[2] for name in self._modules})
        named = ", ".join(missing[:MAX_NAMED])
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        why = ""
        if any(".experts" in name for name in missing):
            why = self.why_no_experts
        elif any(name.endswith(("embed_tokens", "lm_head")) for name in missing):
            why = "; embedding and head are shared by all adapters"
        return (
            f"the adapter in {folder.path} changes {named}{more}, which adapters cannot change "
            f"here{why}; possible: {', '.join(kinds)}"
        )


def _by_expert(bits: np.ndarray, half: str, given: AdapterModule) -> np.ndarray:
    """A stored matrix as [experts, rank, inputs] or [experts, outputs, rank]. PEFT stores A of one
    expert after the other, and of B the experts of one rank next to each other."""
    if not given.num_experts:
        return bits[None]
    if half == "A":
        return bits.reshape(given.num_experts, given.rank, given.in_features)
    return bits.reshape(given.out_features, given.rank, given.num_experts).transpose(2, 0, 1)
