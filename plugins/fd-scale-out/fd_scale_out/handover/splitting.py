"""Blocks of an instance with another number of ranks: which heads of which rank go where.

Blocks come as the other instance has them, into memory of their own, and are divided anew here. So
the transport needs to know nothing of heads, and checksums are those of the other instance.
"""

from __future__ import annotations

import ast
import hashlib
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np

from fastdeploy_core.errors import CapabilityError
from fastdeploy_core.tensor import DTYPE_BYTES

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.types.worker import WorkerInfo

_BITS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """How an instance's blocks lie in its host tier. tensors: of each layer those of one block, as
    (shape, dtype), the same on each rank. num_heads: key-value heads in all, as the model's
    configuration says; where latents are kept in their place it means nothing."""

    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=256)]
    num_heads: int
    tensors: tuple[tuple[tuple[tuple[int, ...], str], ...], ...]

    @property
    def digest(self) -> str:
        """Of everything in it, hexadecimal."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()

    @property
    def block(self) -> np.dtype[np.void]:
        """One rank's block. Names are those of layer and tensor; content is bits."""
        fields = [
            (f"{n} {m}", _BITS[DTYPE_BYTES[dtype]], shape[1:])
            for n, layer in enumerate(self.tensors)
            for m, (shape, dtype) in enumerate(layer)
        ]
        return np.dtype(fields, align=True)


def layout_of(config: EngineConfig, infos: list[WorkerInfo]) -> Layout:
    """That of an engine. Without tensors where ranks differ, or do not say it."""
    model = config.model.hf_config
    model = model.get("text_config", model)
    heads = model.get("num_key_value_heads") or model.get("num_attention_heads") or 0
    said = {info.kv_layout for info in infos}
    tensors = ast.literal_eval(said.pop() or "[]") if len(said) == 1 else []
    return msgspec.convert([len(infos), heads, tensors], Layout)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a tensor: of one of their ranks to one of ours. Slices are of all of its axes."""

    field: str
    rank: int
    there: tuple[slice, ...]
    here: tuple[slice, ...]


def divide(there: Layout, here: Layout) -> list[list[Piece]]:
    """For each of our ranks the pieces that its blocks are made of. CapabilityError if they are not
    the blocks of one model."""
    if [len(layer) for layer in there.tensors] != [len(layer) for layer in here.tensors]:
        raise CapabilityError("the other instance has other layers")
    pieces: list[list[Piece]] = [[] for _ in range(here.num_ranks)]
    for n, (their_layer, our_layer) in enumerate(zip(there.tensors, here.tensors, strict=True)):
        for m, (theirs, ours) in enumerate(zip(their_layer, our_layer, strict=True)):
            if theirs[1] != ours[1] or len(theirs[0]) != len(ours[0]):
                raise CapabilityError(f"layer {n} has {ours} here and {theirs} there")
            for rank, own in enumerate(pieces):
                own += _pieces(f"{n} {m}", theirs[0], ours[0], there, here, rank)
    return pieces


def _pieces(
    field: str,
    theirs: tuple[int, ...],
    ours: tuple[int, ...],
    there: Layout,
    here: Layout,
    rank: int,
) -> list[Piece]:
    differ = [
        axis for axis, pair in enumerate(zip(theirs, ours, strict=True)) if len(set(pair)) > 1
    ]
    if len(differ) > 1:
        raise CapabilityError(f"blocks are {ours} here and {theirs} there")
    whole = (slice(None),) * (len(ours) - 1)  # the first axis is the block
    if not differ:  # as many heads on each rank, or what all ranks have
        source = 0
        if _fits(here, here.num_heads, 1) and _fits(there, here.num_heads, 1):
            first = rank * here.num_heads // here.num_ranks
            source = next(
                r for r in range(there.num_ranks) if r * here.num_heads // there.num_ranks == first
            )
        elif there.num_ranks == here.num_ranks:
            source = rank
        return [Piece(field, source, whole, whole)]
    axis = differ[0]
    num_heads = here.num_heads
    if not (_fits(here, num_heads, ours[axis]) and _fits(there, num_heads, theirs[axis])):
        raise CapabilityError(
            f"blocks are {ours} on each of {here.num_ranks} ranks here and {theirs} on each of "
            f"{there.num_ranks} there, which are not the same {num_heads} heads"
        )
    found, at = [], rank * num_heads // here.num_ranks
    end = at + ours[axis]
    begin = at
    for source in range(there.num_ranks):
        first = source * num_heads // there.num_ranks
        last = first + theirs[axis]
        if first <= at < min(last, end):
            upto = min(last, end)
            parts = (slice(at - first, upto - first), slice(at - begin, upto - begin))
            there_at, here_at = ((*whole[: axis - 1], part, *whole[axis:]) for part in parts)
            found.append(Piece(field, source, there_at, here_at))
            at = upto
    return found


def _fits(layout: Layout, num_heads: int, on_each: int) -> bool:
    """Whether so many heads in all are so many on each rank."""
    return num_heads > 0 and on_each == max(1, num_heads // layout.num_ranks)


class Staging:
    """Where blocks of another layout arrive: block i of it becomes block i of ours, and takes
    memory only until then."""

    def __init__(self, there: Layout, here: Layout, own: list[tuple[memoryview, int]]) -> None:
        """own: the host tier of each of our ranks, and the bytes of its blocks. CapabilityError if
        these do not fit together."""
        self.layout, self._pieces = there, divide(there, here)
        if {size for _, size in own} != {here.block.itemsize}:
            raise CapabilityError("blocks lie in another way than the layout says")
        num_blocks = len(own[0][0]) // own[0][1]
        size = there.block.itemsize
        # Private, so that free() gives pages back.
        how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = [mmap.mmap(-1, num_blocks * size, flags=how) for _ in range(there.num_ranks)]
        self.ranks = [(memoryview(memory), size) for memory in self._memory]
        self._from = [np.frombuffer(memory, there.block) for memory in self._memory]
        self._to = [np.frombuffer(view, here.block, num_blocks) for view, _ in own]

    def move(self, block: int) -> None:
        """A block has come whole: put it into our ranks' host tiers."""
        for target, pieces in zip(self._to, self._pieces, strict=True):
            for piece in pieces:
                source = self._from[piece.rank][piece.field][block]
                target[piece.field][block][piece.here] = source[piece.there]

    def free(self, block: int) -> None:
        """Give the memory of a block back, but for what shares pages with others."""
        page, size = mmap.PAGESIZE, self.ranks[0][1]
        first, last = -(-block * size // page) * page, (block + 1) * size // page * page
        if last > first:
            for memory in self._memory:
                memory.madvise(mmap.MADV_DONTNEED, first, last - first)
