"""The destination of each checkpoint tensor of a model, and the part of it that this rank reads.

Layers announce their tensors here while they are built. Loading is then one loop over the
checkpoint, in any order. Other spellings of the same weights (joined projections, older prefixes)
are also announced, so no model file handles checkpoint dialects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fastdeploy_core.contracts.model import StoredTensor
from fastdeploy_core.errors import WeightError

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

Region = tuple[slice, ...]
# Content with `--load-format dummy`: noise, random bits of the stored dtype, or one number
# everywhere.
Fill = Literal["normal", "bits"] | float
_FLOATS = {"float32", "float16", "bfloat16"}


@dataclass(slots=True)
class Placement:
    """One checkpoint tensor. Shape and region in the model's own layout: linear is [out, in]."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    region: Region  # this rank's part of it
    accept: Callable[[Tensor], None]  # gets the region, in any dtype
    is_linear: bool = False  # the Paddle layout stores it with its last two dimensions swapped
    fill: Fill = "normal"
    required: bool = True
    dtype: str = ""  # of the checkpoint; empty: any; float dtypes stand for each other
    is_held: bool = False  # the layer has the value already: the tensor is checked, not read
    done: bool = False

    def take(self, stored: StoredTensor) -> None:
        """Read this rank's part and pass it to the layer."""
        # A single number may be stored as [], [1] or [1, 1], depending on the tool.
        is_number = math.prod(stored.shape) == math.prod(self.shape) == 1
        if tuple(stored.shape) != self.shape and not is_number:
            raise WeightError(
                f"weight {self.name} has shape {list(stored.shape)}; config.json asks for "
                f"{list(self.shape)}; the checkpoint does not belong to this config.json"
            )
        if self.done:
            raise WeightError(
                f"weight {self.name} comes twice in the checkpoint; expected it once, alone or "
                "joined with others"
            )
        given = stored.dtype
        if self.dtype not in ("", given) and not {self.dtype, given} <= _FLOATS:
            raise WeightError(
                f"weight {self.name} is stored as {stored.dtype}; quantization_config of "
                "config.json "
                f"asks for {self.dtype}; the checkpoint does not belong to this config.json"
            )
        if self.is_held:
            self.done = True
            return
        if is_number:
            self.accept(stored.read().reshape(list(self.shape)))
        else:
            self.accept(stored.read(*self.region))
        self.done = True


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One placement inside a tensor that holds several: at `index` (if any), from `offset` on along
    `dim` of the rest. Without a dim, the parts share the whole tensor."""

    name: str
    offset: int
    index: int | None = None
    dim: int | None = 0


class _Swapped:
    """A stored tensor with its last two dimensions swapped."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self.shape = (*stored.shape[:-2], stored.shape[-1], stored.shape[-2])
        self.dtype = stored.dtype

    def read(self, *region: slice | int) -> Tensor:
        full = [*region, *(slice(None) for _ in self.shape[len(region) :])]
        return self._stored.read(*full[:-2], full[-1], full[-2]).transpose(-1, -2)


class _Part:
    """One part of a joined stored tensor, with the interface of a tensor."""

    def __init__(self, stored: StoredTensor, part: FusedPart, shape: tuple[int, ...]) -> None:
        self._stored, self._part = stored, part
        self.shape = shape
        self.dtype = stored.dtype

    def read(self, *region: slice | int) -> Tensor:
        part, full = self._part, [*region]
        full += [slice(None)] * (len(self.shape) - len(full))
        if part.dim is not None:
            asked = full[part.dim]
            if isinstance(asked, slice):
                start, stop, _ = asked.indices(self.shape[part.dim])
                full[part.dim] = slice(start + part.offset, stop + part.offset)
            else:
                full[part.dim] = asked + part.offset
        lead = () if part.index is None else (part.index,)
        return self._stored.read(*lead, *full)


class WeightMap:
    """All placements of one model on one rank."""

    def __init__(self) -> None:
        self.placements: dict[str, Placement] = {}
        # tensors kept unread, for parts that are built later
        self.kept: dict[str, StoredTensor] = {}
        self.swap_linear = False  # the checkpoint stores linear weights as [in, out] (Paddle)
        self._fused: dict[str, tuple[tuple[int, ...], list[FusedPart]]] = {}
        self._renames: list[tuple[str, str]] = []
        self._ignored: list[str] = []
        self._kept_prefixes: list[str] = []
        self._elsewhere: set[str] = set()
        self._finishers: list[Callable[[], None]] = []

    def same_dialect(self) -> WeightMap:
        """An empty map that knows the same spellings."""
        other = WeightMap()
        other.swap_linear = self.swap_linear
        other._renames, other._ignored = list(self._renames), list(self._ignored)
        return other

    def add(self, placement: Placement) -> None:
        """Announce one checkpoint tensor."""
        if placement.name in self.placements:
            raise ValueError(f"two layers of one model are called {placement.name}")
        self.placements[placement.name] = placement

    def add_fused(self, name: str, shape: tuple[int, ...], parts: Sequence[FusedPart]) -> None:
        """Announce that a checkpoint may hold several placements in one tensor of this name."""
        self._fused[name] = (shape, list(parts))

    def rename(self, old: str, new: str) -> None:
        """Checkpoint names may contain `old` where this model has `new`."""
        self._renames.append((old, new))

    def ignore(self, text: str) -> None:
        """The model needs no checkpoint tensor whose name contains this text."""
        self._ignored.append(text)

    def leave_to_others(self, prefix: str) -> None:
        """Tensors with this prefix belong to other ranks."""
        self._elsewhere.add(prefix)

    def keep(self, prefix: str) -> None:
        """Tensors with this prefix are kept unread in `kept`, for parts built later."""
        self._kept_prefixes.append(prefix)

    def load(self, tensors: Iterable[tuple[str, StoredTensor]]) -> list[str]:
        """Take every known tensor; returns the unknown names."""
        unknown = []
        for given, stored in tensors:
            name = self.canonical(given)
            if name in self.placements:
                self._take(self.placements[name], stored)
            elif name in self._fused:
                self._take_fused(name, stored)
            elif any(name.startswith(prefix) for prefix in self._kept_prefixes):
                self.kept[name] = stored
            elif not (self._is_elsewhere(name) or any(text in name for text in self._ignored)):
                unknown.append(given)
        return unknown

    def _is_elsewhere(self, name: str) -> bool:
        if not self._elsewhere:
            return False
        parts = name.split(".")
        return any(".".join(parts[:n]) in self._elsewhere for n in range(len(parts), 0, -1))

    def mark(self) -> tuple[int, int]:
        """The current state, for hold()."""
        return len(self.placements), len(self._finishers)

    def hold(self, mark: tuple[int, int]) -> None:
        """Values announced since `mark` exist already."""
        for placement in list(self.placements.values())[mark[0] :]:
            placement.is_held = True
        del self._finishers[mark[1] :]

    def when_loaded(self, call: Callable[[], None]) -> None:
        """Register a function for finish(): only then layers know that no optional tensor comes."""
        self._finishers.append(call)

    def finish(self) -> None:
        """All tensors of the checkpoint have been offered."""
        for call in self._finishers:
            call()
        self._finishers.clear()

    def parts_of(self, name: str) -> list[str]:
        """Placements that a checkpoint tensor fills, by its canonical name; empty if unknown."""
        if name in self.placements:
            return [name]
        return [part.name for part in self._fused[name][1]] if name in self._fused else []

    def missing(self) -> list[str]:
        """Names of required tensors that have not arrived."""
        return [p.name for p in self.placements.values() if p.required and not p.done]

    def canonical(self, name: str) -> str:
        """A checkpoint's name in this model's spelling."""
        for old, new in self._renames:
            name = name.replace(old, new)
        return name

    def _take(self, placement: Placement, stored: StoredTensor) -> None:
        if self.swap_linear and placement.is_linear and len(stored.shape) >= 2:
            stored = _Swapped(stored)
        placement.take(stored)

    def _take_fused(self, name: str, stored: StoredTensor) -> None:
        shape, parts = self._fused[name]
        if self.swap_linear and len(stored.shape) >= 2:
            stored = _Swapped(stored)
        if tuple(stored.shape) != shape:
            raise WeightError(
                f"weight {name} has shape {list(stored.shape)}; config.json asks for "
                f"{list(shape)}; the checkpoint does not belong to this config.json"
            )
        for part in parts:
            placement = self.placements[part.name]
            placement.take(_Part(stored, part, placement.shape))
