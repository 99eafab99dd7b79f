"""The side that computes a prompt for another instance: what it has, and how long it keeps it.

A state machine: it is told what happened and says what is to be done. Blocks are held, and their
content stays, from `add` until `world.release`.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from fastdeploy_core.types import SequenceDelta

from .messages import Abort, Aborted, Alive, Commit, First, Have, Want
from .parts import Parts

LEASE_S: Final = 10.0  # without a word of the other side a handover is over
BEAT_S: Final = 2.0  # between two Alive


class SendingWorld(Protocol):
    """What a Sending has done."""

    def say(self, peer: str, note: msgspec.Struct) -> None:
        """Send a note."""
        ...

    def release(self, blocks: list[int]) -> None:
        """Nobody reads these host blocks any more."""
        ...


class Sending:
    """One prompt. It is over once it was accepted, given up by either side, or forgotten: after
    LEASE_S without a word. One thread calls."""

    def __init__(
        self, name: str, keys: list[bytes], world: SendingWorld, now: float, parts: Parts
    ) -> None:
        """keys: of the prompt's full blocks."""
        self.name, self.keys, self.parts, self.num_blocks = name, keys, parts, parts.total
        self.num_checked = 0  # blocks whose checksums are being computed: its owner counts
        self.is_over = self.is_accepted = self.is_committed = False
        self._world = world
        self._peer, self._attempt = "", 0
        self._held: dict[int, tuple[int, int]] = {}  # by number: host block, checksum
        self._next = 0  # the first block that the peer has not been told of
        self._is_told = self._is_first_told = False  # of the commit, and of the first token
        self._total = len(keys)
        self._first: tuple[SequenceDelta, int | None] | None = None
        self._is_failed = False  # the peer was told, and has not answered yet
        self._lease_s, self._beat_s = now + LEASE_S, now + BEAT_S

    @property
    def num_leading(self) -> int:
        """Blocks that are there without a gap."""
        return next((i for i in range(self.num_blocks) if i not in self._held), self.num_blocks)

    def add(self, number: int, block: int, checksum: int) -> None:
        """Block `number` of the prompt is in this host block. The peer hears of it with the next
        tick, so that blocks which are ready together come in one Have."""
        if self.is_over or number in self._held:
            self._world.release([block])
            return
        self._held[number] = block, checksum

    def first(self, token: SequenceDelta, num_cached_tokens: int | None) -> None:
        """The prompt is computed. Its last blocks follow; the client need not wait for them."""
        self._first = token, num_cached_tokens
        self._tell()

    def commit(self) -> None:
        """All blocks are here. Those after the first one that is missing will not come."""
        if not self.is_over and not self.is_committed:
            self.is_committed = True
            self._total = self.num_leading
            self._tell()

    def want(self, peer: str, note: Want, now: float) -> None:
        """A decode instance asks. A newer attempt takes the place of the older one."""
        if note.attempt <= self._attempt:
            return
        if self.is_over or self._is_failed or not self._fits(note):
            reason = "it is over" if self.is_over or self._is_failed else "it is another prompt"
            self._world.say(peer, Abort(self.name, note.attempt, reason))
            return
        self._peer, self._attempt = peer, note.attempt
        self._next, self._is_told, self._is_first_told = note.first, False, False
        self._lease_s, self._beat_s = now + LEASE_S, now
        self._tell()

    def hear(self, peer: str, attempt: int, now: float) -> None:
        """Whom it is for is still there."""
        if (peer, attempt) == (self._peer, self._attempt):
            self._lease_s = now + LEASE_S

    def accept(self, peer: str, attempt: int) -> None:
        """What is of use there has come."""
        if (peer, attempt) == (self._peer, self._attempt) and not self.is_over:
            self.is_accepted = True
            self._end()

    def abort(self, peer: str, attempt: int) -> None:
        """It is not wanted there any more."""
        self._world.say(peer, Aborted(self.name, attempt))
        if (peer, attempt) == (self._peer, self._attempt):
            self._end()

    def aborted(self, peer: str, attempt: int) -> None:
        """The peer knows of the failure, and reads nothing any more."""
        if (peer, attempt) == (self._peer, self._attempt) and self._is_failed:
            self._end()

    def lose(self, peer: str) -> None:
        """The peer is gone, and reads nothing any more."""
        if peer and peer == self._peer:
            self._end()

    def fail(self, reason: str) -> None:
        """It will not be computed, or must not be used. Blocks are kept until the peer knows."""
        if self.is_over or self._is_failed:
            return
        self._is_failed = True
        if self._peer:
            self._world.say(self._peer, Abort(self.name, self._attempt, reason))
        else:
            self._end()

    def tick(self, now: float) -> None:
        """Time passes."""
        if self.is_over:
            return
        self._tell()
        if now >= self._lease_s:
            self._end()
        elif self._peer and not self._is_failed and now >= self._beat_s:
            self._beat_s = now + BEAT_S
            self._world.say(self._peer, Alive(self.name, self._attempt))

    def _fits(self, note: Want) -> bool:
        is_same = (note.total, note.last_key) == (self.num_blocks, self.keys[-1])
        return is_same and 0 <= note.first <= note.total

    def _tell(self) -> None:
        """Say what is new: the first token at once, blocks without gaps and in order."""
        if not self._peer or self._is_failed or self.is_over:
            return
        if self._first is not None and not self._is_first_told:
            self._is_first_told = True
            self._world.say(self._peer, First(self.name, self._attempt, *self._first))
        end = self.num_leading
        while self._next < end:
            numbers = self.parts.together(self._next, end)
            held, checksums = zip(*(self._held[n] for n in numbers), strict=True)
            blocks = self.parts.within_group(self._next, held)
            note = Have(self.name, self._attempt, self._next, blocks, list(checksums))
            self._world.say(self._peer, note)
            self._next = numbers.stop
        if self.is_committed and not self._is_told:
            self._is_told = True
            self._world.say(self._peer, Commit(self.name, self._attempt, self._total))

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._world.release([block for block, _ in self._held.values()])
            self._held.clear()
