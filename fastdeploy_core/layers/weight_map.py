"""Where each checkpoint tensor of a model goes, and which part of it this rank reads.

Layers announce their tensors here while they are built; loading is then one loop over whatever the
checkpoint holds, in whatever order. Other spellings of the same weights (fused projections, older
prefixes) are announced beside them, so that no model file handles checkpoint dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fastdeploy_core.contracts.model import StoredTensor
from fastdeploy_core.errors import WeightError

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

Region = tuple[slice, ...]
Fill = Literal["normal", "ones", "zeros"]


@dataclass(slots=True)
class Placement:
    """One checkpoint tensor. Shape and region are in the model's own layout: linear is [out, in]."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    region: Region  # of it, what this rank holds
    accept: Callable[[Tensor], None]  # takes the region, in any dtype
    is_linear: bool = False  # Paddle layout stores it with its last two dimensions swapped
    fill: Fill = "normal"  # what `--load-format dummy` makes of it
    required: bool = True
    done: bool = False

    def take(self, stored: StoredTensor) -> None:
        """Read this rank's part and hand it to the layer."""
        if tuple(stored.shape) != self.shape:
            raise WeightError(
                f"weight {self.name} has shape {list(stored.shape)}; config.json asks for "
                f"{list(self.shape)}; the checkpoint does not belong to this config.json"
            )
        if self.done:
            raise WeightError(
                f"weight {self.name} comes twice in the checkpoint; expected it once, alone or joined "
                "with others"
            )
        self.accept(stored.read(*self.region))
        self.done = True


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One placement inside a tensor that holds several: at `index` (if any), from row `offset` on."""

    name: str
    offset: int
    index: int | None = None


class _Swapped:
    """A stored tensor seen with its last two dimensions exchanged."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self.shape = (*stored.shape[:-2], stored.shape[-1], stored.shape[-2])
        self.dtype = stored.dtype

    def read(self, *region: slice | int) -> Tensor:
        full = [*region, *(slice(None) for _ in self.shape[len(region) :])]
        return self._stored.read(*full[:-2], full[-1], full[-2]).transpose(-1, -2)


class _Part:
    """One part of a fused stored tensor, looking like a tensor of its own."""

    def __init__(self, stored: StoredTensor, part: FusedPart, shape: tuple[int, ...]) -> None:
        self._stored, self._part = stored, part
        self.shape = shape
        self.dtype = stored.dtype

    def read(self, *region: slice | int) -> Tensor:
        rows = region[0] if region else slice(None)
        offset = self._part.offset
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.shape[0])
            moved: slice | int = slice(start + offset, stop + offset)
        else:
            moved = rows + offset
        lead = () if self._part.index is None else (self._part.index,)
        return self._stored.read(*lead, moved, *region[1:])


class WeightMap:
    """All placements of one model on one rank."""

    def __init__(self) -> None:
        self.placements: dict[str, Placement] = {}
        self.kept: dict[str, StoredTensor] = {}  # accepted for later, not read
        self.swap_linear = False  # the checkpoint stores linear weights as [in, out] (Paddle)
        self._fused: dict[str, tuple[tuple[int, ...], list[FusedPart]]] = {}
        self._renames: list[tuple[str, str]] = []
        self._ignored: list[str] = []
        self._kept_prefixes: list[str] = []

    def same_dialect(self) -> WeightMap:
        """An empty map that understands the same spellings."""
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
        """Checkpoint names may hold `old` where this model says `new`."""
        self._renames.append((old, new))

    def ignore(self, text: str) -> None:
        """Checkpoint tensors with this text in their name carry nothing the model needs."""
        self._ignored.append(text)

    def keep(self, prefix: str) -> None:
        """Tensors with this prefix are kept unread in `kept`, for parts built later."""
        self._kept_prefixes.append(prefix)

    def load(self, tensors: Iterable[tuple[str, StoredTensor]]) -> list[str]:
        """Take every known tensor; return the unknown names."""
        unknown = []
        for given, stored in tensors:
            name = self.canonical(given)
            if name in self.placements:
                self._take(self.placements[name], stored)
            elif name in self._fused:
                self._take_fused(name, stored)
            elif any(name.startswith(prefix) for prefix in self._kept_prefixes):
                self.kept[name] = stored
            elif not any(text in name for text in self._ignored):
                unknown.append(given)
        return unknown

    def missing(self) -> list[str]:
        """Names of required tensors that have not come yet."""
        return [p.name for p in self.placements.values() if p.required and not p.done]

    def canonical(self, name: str) -> str:
        """A checkpoint's name as this model says it."""
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
                f"weight {name} has shape {list(stored.shape)}; config.json asks for {list(shape)}; "
                "the checkpoint does not belong to this config.json"
            )
        for part in parts:
            placement = self.placements[part.name]
            placement.take(_Part(stored, part, placement.shape))
