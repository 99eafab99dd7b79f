"""Chooses one of several engines for a request: the one that should show its first token first.

The wait for that token is estimated in prompt tokens: those that wait before it in the engine,
those of its own that the engine has not cached, and a few for each sequence that the engine runs.
So a prompt goes where its beginning was sent before, unless that engine has so much more to do that
another one would answer sooner even without the cache.

All numbers come from what front ends sent and saw end; no engine is asked. What an engine has
evicted since is not known here: a wrong guess costs time and nothing else.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.types import Request

# A sequence of an engine delays a new prompt like so many prompt tokens: it takes part in each of
# the prompt's steps and makes them longer.
SEQUENCE_TOKENS = 16
NUM_SLOTS = 2**16  # prompt blocks remembered per engine; a newer one may take an older one's slot
WORD_BYTES = 8


@dataclass(slots=True)
class Placement:
    """Where a request went, and what it adds to that engine's load."""

    engine: int
    num_sequences: int
    num_waiting: int  # prompt tokens to compute before its first token; 0: that came


class Balance:
    """What the front ends of one port sent to each engine. Calls come one at a time.

    `path`: a file that several front ends map; each writes its own row of loads, and all write the
    table of prompt blocks. Numbers are written and read whole, without locks. Without a file it is
    memory of this process, the only front end.
    """

    def __init__(self, config: EngineConfig, front_end: int = 0, path: Path | None = None) -> None:
        self._num_engines = config.parallel.data_parallel_size
        self._block_size = config.cache.block_size
        self._has_cache = config.cache.enable_prefix_caching
        if path is None:
            self._memory = mmap.mmap(-1, _num_bytes(self._num_engines, 1))
        else:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
        table = memoryview(self._memory)
        start = self._num_engines * NUM_SLOTS * WORD_BYTES
        self._blocks = table[:start].cast(
            "Q"
        )  # by engine and slot: the hash of a block it was sent
        self._loads = table[start:].cast("q")  # by front end and engine: tokens waiting, sequences
        self._own = front_end * self._num_engines * 2
        for place in range(self._own, self._own + self._num_engines * 2):
            self._loads[place] = 0  # what an earlier process of this number sent has ended
        self._next = front_end  # preferred among equals

    @staticmethod
    def create(config: EngineConfig, num_front_ends: int, path: Path) -> None:
        """Make the file for so many front ends."""
        with path.open("xb") as file:
            path.chmod(0o600)
            file.truncate(_num_bytes(config.parallel.data_parallel_size, num_front_ends))

    def hashes(self, request: Request) -> list[int]:
        """A number for each whole block of the prompt, which stands for all tokens up to its end.
        Any thread."""
        found: list[int] = []
        if not self._has_cache:
            return found
        tokens = memoryview(array("q", request.prompt_token_ids)).cast("B")
        size = self._block_size * WORD_BYTES
        before = request.cache_salt.encode()
        for end in range(size, len(tokens) + 1, size):
            before = blake2b(before + tokens[end - size : end], digest_size=WORD_BYTES).digest()
            found.append(int.from_bytes(before, "little"))
        return found

    def place(self, request: Request, hashes: Sequence[int], engines: Iterable[int]) -> Placement:
        """Choose one of these engines and count the request there."""
        count = self._num_engines
        in_turn = sorted(engines, key=lambda engine: (engine - self._next) % count)
        uncached = {engine: self._num_uncached(request, hashes, engine) for engine in in_turn}
        engine = min(in_turn, key=lambda engine: self.load(engine) + uncached[engine])
        self._next = (engine + 1) % count
        for known in hashes:
            self._blocks[engine * NUM_SLOTS + known % NUM_SLOTS] = known
        placement = Placement(engine, request.sampling.n, uncached[engine])
        self._add(placement, 1)
        return placement

    def load(self, engine: int) -> int:
        """Prompt tokens that a new prompt has to wait for."""
        loads, row = self._loads, self._num_engines * 2
        waiting = sum(loads[place] for place in range(engine * 2, len(loads), row))
        sequences = sum(loads[place] for place in range(engine * 2 + 1, len(loads), row))
        return waiting + SEQUENCE_TOKENS * sequences

    def first_token(self, placement: Placement) -> None:
        """The engine has computed the prompt."""
        self._loads[self._own + placement.engine * 2] -= placement.num_waiting
        placement.num_waiting = 0

    def ended(self, placement: Placement) -> None:
        """The engine does not answer this request any more."""
        self._add(placement, -1)

    def forget(self, engine: int) -> None:
        """The engine ended, and its cache with it."""
        zeros = memoryview(bytes(NUM_SLOTS * WORD_BYTES)).cast("Q")
        self._blocks[engine * NUM_SLOTS : (engine + 1) * NUM_SLOTS] = zeros

    def _add(self, placement: Placement, sign: int) -> None:
        place = self._own + placement.engine * 2
        self._loads[place] += sign * placement.num_waiting
        self._loads[place + 1] += sign * placement.num_sequences

    def _num_uncached(self, request: Request, hashes: Sequence[int], engine: int) -> int:
        start, num_blocks = engine * NUM_SLOTS, len(hashes)
        # A known block means that all before it were sent too, even if their slots are taken.
        while num_blocks:
            known = hashes[num_blocks - 1]
            if self._blocks[start + known % NUM_SLOTS] == known:
                break
            num_blocks -= 1
        # The last token of a prompt is always computed.
        return max(1, len(request.prompt_token_ids) - num_blocks * self._block_size)


def _num_bytes(num_engines: int, num_front_ends: int) -> int:
    return num_engines * (NUM_SLOTS + num_front_ends * 2) * WORD_BYTES
