"""The side that answers: it reserves room when blocks are there to fill it, pulls and checks them,
and gives a request free once all has come or will not come.

A state machine: it is told what happened and says what is to be done. Whatever fails, what has come
whole is kept and the rest is computed here: the answer depends on none of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from .messages import Abort, Aborted, Accept, Alive, Commit, First, Have, Want
from .parts import Parts
from .sending import BEAT_S, LEASE_S

MAX_PULLS: Final = 2  # of one handover at once: one arrives while the next is asked for
MAX_TRIES: Final = 2  # of one pull


class ReceivingWorld(Protocol):
    """What a Receiving has done."""

    def say(self, peer: str, note: msgspec.Struct) -> None:
        """Send a note."""
        ...

    def reserve(self, first: int, count: int) -> list[int]:
        """At most so many host blocks to fill with those of numbers `first` and up."""
        ...

    def pull(self, owner: Receiving, pull: Pull, attempt: int) -> bool:
        """Fetch pull.sources into pull.targets; `pulled` follows. False: the peer is gone."""
        ...

    def cancel(self, pull: Pull) -> bool:
        """Stop it. False: bytes may still arrive, so the targets must not be used."""
        ...

    def check(self, owner: Receiving, pull: Pull) -> None:
        """Compare what came with its checksums; `checked` follows."""
        ...

    def adopt(self, first: int, blocks: list[int]) -> None:
        """Blocks of the prompt, from number `first` on, are in these host blocks."""
        ...

    def release(self, blocks: list[int]) -> None:
        """These host blocks are not needed here any more."""
        ...

    def quarantine(self, peer: str, blocks: list[int]) -> None:
        """The same, once nothing of that peer can arrive any more."""
        ...

    def take_first(self, note: First) -> None:
        """The request's first token, which its client gets at once; before `finish`."""
        ...

    def finish(self, failure: str) -> None:
        """The request goes on. failure: why not all has come; empty: it has."""
        ...


@dataclass(slots=True, eq=False)
class Pull:
    """Blocks on their way: of numbers `first` and up."""

    first: int
    sources: list[int]
    checksums: list[int]
    targets: list[int]
    num_tries: int = 0
    num_good: int | None = None  # leading blocks that came whole, once that is known
    is_moving: bool = False
    is_unsafe: bool = False  # a transfer of it has ended, and its bytes may arrive all the same


class Receiving:
    """One prompt. It is over once `world.finish` was called. One thread calls."""

    def __init__(
        self,
        name: str,
        peer: str,
        want: Want,
        world: ReceivingWorld,
        now: float,
        timeout_s: float,
        parts: Parts,
    ) -> None:
        """want: what is asked for."""
        self.name, self.peer, self.parts, self.is_over = name, peer, parts, False
        self._world, self._want = world, want
        self._announced: deque[Have] = deque()
        self._pulls: deque[Pull] = deque()  # in the order of their blocks
        self._expected = want.first  # the block that is announced next
        self._has_room, self._is_unsafe = True, False
        self._adopted: list[int] = []
        self._has_first = False
        self._commit: Commit | None = None
        self._end_s, self._lease_s, self._beat_s = now + timeout_s, now + LEASE_S, now + BEAT_S
        world.say(peer, want)

    def have(self, note: Have, now: float) -> None:
        """The peer has blocks."""
        if not self._is_news(note, now) or note.first != self._expected:
            return  # said twice
        count, room = len(note.blocks), self._want.total - note.first
        if not 0 < count == len(note.checksums) <= room or self._is_mixed(note.first, count):
            self.give_up("the other instance names blocks that do not exist")
            return
        self._expected += count
        if self._has_room:
            self._announced.append(note)
            self._pull()

    def first(self, note: First, now: float) -> None:
        """The peer has computed the prompt."""
        if self._is_news(note, now) and not self._has_first:
            self._has_first = True
            self._world.take_first(note)

    def commit(self, note: Commit, now: float) -> None:
        """The peer has all blocks."""
        if self._is_news(note, now) and self._commit is None:
            self._commit = note
            self._settle()

    def hear(self, note: Alive, now: float) -> None:
        """The peer is still there."""
        self._is_news(note, now)

    def moved(self, now: float) -> None:
        """Bytes of the peer have come. On a slow network its words may wait long behind them."""
        self._lease_s = now + LEASE_S

    def abort(self, note: Abort) -> None:
        """The peer gives up."""
        if note.attempt == self._want.attempt:
            self.give_up(f"the other instance says: {note.reason[:200]}", tell=False)
        if not self._is_unsafe:
            self._world.say(self.peer, Aborted(self.name, note.attempt))

    def pulled(self, pull: Pull, failure: str = "", *, is_retryable: bool = False) -> None:
        """A pull has ended; failure: how, empty where all bytes are here."""
        if self.is_over:
            return
        pull.is_moving = False
        if not failure:
            self._world.check(self, pull)
        elif (
            pull.is_unsafe
            or not is_retryable
            or pull.num_tries >= MAX_TRIES
            or not self._begin(pull)
        ):
            self.give_up(failure)

    def checked(self, pull: Pull, num_good: int) -> None:
        """So many leading blocks of a pull are whole."""
        if self.is_over:
            return
        pull.num_good = num_good
        while self._pulls and self._pulls[0].num_good is not None:
            done = self._pulls[0]
            good = done.targets[: done.num_good]
            self._world.adopt(done.first, good)
            self._adopted += good
            if len(good) < len(done.targets):
                done.targets = done.targets[len(good) :]
                self.give_up("a block came damaged")
                return
            self._pulls.popleft()
        self._pull()
        self._settle()

    def lose(self, peer: str) -> None:
        """A peer is gone."""
        if peer == self.peer:
            self.give_up("the other instance is gone", tell=False)

    def tick(self, now: float) -> None:
        """Time passes."""
        if self.is_over:
            return
        if now >= self._end_s:
            self.give_up("it took too long (--kv-transport-timeout)")
        elif now >= self._lease_s:
            self.give_up(f"no word of the other instance for {LEASE_S:g} s")
        elif now >= self._beat_s:
            self._beat_s = now + BEAT_S
            self._world.say(self.peer, Alive(self.name, self._want.attempt))

    def end(self) -> None:
        """The request has ended: with its first token, or because nobody wants it."""
        if not self._has_first:
            self.give_up("the request has ended")
        elif not self.is_over:
            self._let_go()
            self._world.say(self.peer, Accept(self.name, self._want.attempt))
            self._finish("")

    def give_up(self, reason: str, *, tell: bool = True) -> None:
        """What has come is kept; the rest is computed here."""
        if self.is_over:
            return
        self._let_go()
        if tell:
            self._world.say(self.peer, Abort(self.name, self._want.attempt, reason))
        self._finish(reason)

    def _let_go(self) -> None:
        """Of blocks that are on their way."""
        for pull in self._pulls:
            if (pull.is_moving and not self._world.cancel(pull)) or pull.is_unsafe:
                self._is_unsafe = True
                self._world.quarantine(self.peer, pull.targets)
            else:
                self._world.release(pull.targets)
        self._pulls.clear()

    def _is_news(self, note: Have | First | Commit | Alive, now: float) -> bool:
        if self.is_over or note.attempt != self._want.attempt:
            return False
        self._lease_s = now + LEASE_S
        return True

    def _is_mixed(self, first: int, count: int) -> bool:
        """Whether these are blocks of several groups of layers."""
        return self.parts.place(first)[0] != self.parts.place(first + count - 1)[0]

    def _pull(self) -> None:
        while self._announced and len(self._pulls) < MAX_PULLS and not self.is_over:
            note = self._announced.popleft()
            first, blocks, checksums = note.first, list(note.blocks), list(note.checksums)
            # What was announced while others were on their way comes in one transfer.
            while self._announced:
                end = self._announced[0].first + len(self._announced[0].blocks)
                if self.parts.together(first, end).stop < end:
                    break
                more = self._announced.popleft()
                blocks += more.blocks
                checksums += more.checksums
            targets = self._world.reserve(first, len(blocks))
            if len(targets) < len(blocks):  # what finds no room is computed
                self._has_room = False
                self._announced.clear()
            if targets:
                count = len(targets)
                pull = Pull(first, blocks[:count], checksums[:count], targets)
                self._pulls.append(pull)
                if not self._begin(pull):
                    self.give_up("the other instance is gone", tell=False)

    def _begin(self, pull: Pull) -> bool:
        pull.num_tries += 1
        pull.is_moving = self._world.pull(self, pull, pull.num_tries)
        return pull.is_moving

    def _settle(self) -> None:
        commit = self._commit
        if self.is_over or commit is None or self._announced or self._pulls:
            return
        if self._expected < commit.total:
            self.give_up("blocks were not announced")
            return
        self._world.say(self.peer, Accept(self.name, self._want.attempt))
        self._finish("")

    def _finish(self, failure: str) -> None:
        self.is_over = True
        self._announced.clear()
        self._world.release(self._adopted)
        self._world.finish(failure)
