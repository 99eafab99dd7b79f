"""Ranks of fd_cuda.one_shot that take turns in one process: what one waits for has been written
before it starts, so nothing ever waits."""

from __future__ import annotations

import torch

from fd_cuda import one_shot
from fd_cuda.one_shot import OneShot


class RanksInTurn:
    """As many ranks as asked for, with pieces of memory on one device."""

    def __init__(self, world_size: int, device: str) -> None:
        self._pieces = [
            torch.zeros(one_shot.PIECE_BYTES, dtype=torch.uint8, device=device)
            for _ in range(world_size)
        ]
        addresses = [piece.data_ptr() for piece in self._pieces]
        self._ranks = []
        for rank in range(world_size):
            own = object.__new__(OneShot)  # without processes to exchange memory with
            own._rank, own._world_size = rank, world_size
            own._bases = torch.tensor(addresses, device=device)
            self._ranks.append(own)
        self._calls = 0

    def all_reduce(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """What each rank finds to be the sum of all parts, one per rank."""
        self._calls += 1
        half = one_shot._DATA_AT + self._calls % 2 * one_shot.MAX_BYTES
        for rank, part in enumerate(
            parts
        ):  # every rank has arrived, as far as those before it can see
            there = self._pieces[rank][half : half + part.nbytes].view(part.dtype)
            there.copy_(part)
            for piece in self._pieces[:rank]:
                flags = piece[one_shot._FLAGS_AT :][: one_shot.BLOCKS * one_shot._WORDS * 4]
                flags.view(torch.int32).view(one_shot.BLOCKS, -1)[:, rank] = self._calls
        return [rank.all_reduce(part) for rank, part in zip(self._ranks, parts, strict=True)]

    def calls(self) -> list[int]:
        """How many calls the blocks of rank 0 have counted."""
        counted = self._pieces[0][one_shot._CALLS_AT :][: one_shot.BLOCKS * 4]
        return counted.view(torch.int32).tolist()
