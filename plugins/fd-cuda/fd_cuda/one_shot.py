"""Sums over ranks in one kernel over peer memory: every rank reads all parts and adds them itself.

For small tensors this takes one trip over the link, where a ring takes several. Every rank adds in
rank order in float32, so all ranks get the same bits in every call.

A call copies its own part to its own piece of peer memory, tells the other ranks, waits for theirs,
and reads all pieces. A piece has two halves that are used in turn: a peer that announces call n + 1
has finished reading call n, so two halves are enough. The number of the call is kept on the device,
so that graphs can be replayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from fd_cuda.kernels.common import pad2

from .peer_memory import PeerMemory

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store

MAX_BYTES: Final = 256 << 10
BLOCKS: Final = 16  # always the same number, so that all blocks of all ranks count the same calls
_TILE: Final = 2048
_WORDS: Final = 64  # flags of one block, in words: 256 bytes apart
# Layout of a piece: a word that ends all waiting, the call numbers, flags, two halves of data.
_CALLS_AT: Final = 256
_FLAGS_AT: Final = _CALLS_AT + BLOCKS * 4
_DATA_AT: Final = 8192
PIECE_BYTES: Final = _DATA_AT + 2 * MAX_BYTES


@triton.jit
def one_shot_sum(
    x,
    out,
    bases,
    count,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    WORLD_PAD: tl.constexpr,
    TILE: tl.constexpr,
    CALLS_AT: tl.constexpr,
    FLAGS_AT: tl.constexpr,
    DATA_AT: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Grid (BLOCKS,). bases: [WORLD] int64 addresses of the pieces. count: elements of x and
    out."""
    block = tl.program_id(0)
    element: tl.constexpr = x.dtype.element_ty
    own = tl.load(bases + RANK)
    calls = (own + CALLS_AT).to(tl.pointer_type(tl.int32)) + block
    call = tl.load(calls) + 1
    half = DATA_AT + (call % 2) * HALF_BYTES
    mine = (own + half).to(tl.pointer_type(element))
    n = tl.arange(0, TILE)
    step = tl.num_programs(0) * TILE
    for start in range(block * TILE, count, step):
        inside = start + n < count
        # Pieces are aligned, but the compiler cannot see that of a loaded address; accesses of 16
        # bytes depend on it.
        to = tl.multiple_of(tl.max_contiguous(mine + start + n, [TILE]), [16])
        tl.store(to, tl.load(x + start + n, mask=inside), mask=inside)
    tl.debug_barrier()  # all threads' stores come before the announcement

    r = tl.arange(0, WORLD_PAD)
    is_rank = r < WORLD
    theirs = (tl.load(bases + r, mask=is_rank, other=0) + FLAGS_AT).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + block * WORDS + RANK, call, mask=is_rank, sem="release", scope="sys")
    flags = (own + FLAGS_AT).to(tl.pointer_type(tl.int32)) + block * WORDS + r
    stop = own.to(tl.pointer_type(tl.int32))
    waiting = True
    while waiting:
        seen = tl.atomic_add(flags, 0, mask=is_rank, sem="acquire", scope="sys")
        # Call numbers wrap around, so their difference is compared.
        missing = tl.sum((is_rank & (seen - call < 0)).to(tl.int32), 0)
        waiting = (missing > 0) & (tl.load(stop, volatile=True) == 0)
    tl.debug_barrier()

    for start in range(block * TILE, count, step):
        inside = start + n < count
        total = tl.zeros([TILE], tl.float32)
        for rank in tl.static_range(WORLD):
            data = (tl.load(bases + rank) + half).to(tl.pointer_type(element)) + start + n
            data = tl.multiple_of(tl.max_contiguous(data, [TILE]), [16])
            total += tl.load(data, mask=inside, other=0.0, volatile=True).to(tl.float32)
        tl.store(out + start + n, total.to(element), mask=inside)
    tl.store(calls, call)


class OneShot:
    """Peer memory of a group, and the kernel over it."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._memory = PeerMemory(store, "one_shot", rank, world_size, PIECE_BYTES)
        self._bases = torch.tensor(self._memory.addresses, dtype=torch.int64, device="cuda")

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum, in a new tensor; x is contiguous and of at most MAX_BYTES."""
        out = torch.empty_like(x)
        one_shot_sum[(BLOCKS,)](
            x,
            out,
            self._bases,
            x.numel(),
            RANK=self._rank,
            WORLD=self._world_size,
            WORLD_PAD=pad2(self._world_size),
            TILE=_TILE,
            CALLS_AT=_CALLS_AT,
            FLAGS_AT=_FLAGS_AT,
            DATA_AT=_DATA_AT,
            HALF_BYTES=MAX_BYTES,
            WORDS=_WORDS,
            num_warps=8,
        )
        return out

    def stop(self) -> None:
        """A rank is gone: end all waiting, now and later."""
        self._memory.set_word(0, 1)

    def close(self) -> None:
        """Free the memory; no rank may be using it."""
        self._memory.close()
