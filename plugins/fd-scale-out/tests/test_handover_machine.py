"""The two state machines of a handover under any order of what can happen: grants, writes, commits,
aborts, crashes, notes said twice, old attempts, transports that cannot stop a write."""

from __future__ import annotations

from collections import deque
from typing import Any

from fd_scale_out.handover.messages import (
    Abort,
    Aborted,
    Accept,
    Alive,
    Commit,
    First,
    Have,
    Want,
)
from fd_scale_out.handover.parts import Parts
from fd_scale_out.handover.receiving import Pull, Receiving
from fd_scale_out.handover.sending import LEASE_S, Sending
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fastdeploy_core.types import SequenceDelta

NUM_BLOCKS = 6
NAME = "0" * 32
KEYS = [bytes([number]) * 32 for number in range(NUM_BLOCKS)]
FIRST = SequenceDelta(token_ids=[17])
GARBAGE = -1


class Pool:
    """Host blocks: what is in each, who may use it, and what must never be written to."""

    def __init__(self, size: int) -> None:
        self.content = [GARBAGE] * size
        self.free = list(range(size))
        self.held: set[int] = set()

    def take(self, count: int) -> list[int]:
        taken = [self.free.pop() for _ in range(min(count, len(self.free)))]
        self.held.update(taken)
        return taken

    def give(self, blocks: list[int]) -> None:
        for block in blocks:
            assert block in self.held, "given back twice"
            self.held.remove(block)
            self.content[block] = GARBAGE  # somebody else's now
            self.free.append(block)


class Handover(RuleBasedStateMachine):
    """A prefill side, a decode side, the notes between them, and bytes on their way."""

    @initialize(
        first=st.integers(0, NUM_BLOCKS),
        room=st.integers(0, NUM_BLOCKS + 2),
        can_stop=st.booleans(),
        attempt=st.integers(1, 3),
        head_start=st.integers(0, NUM_BLOCKS),
    )
    def begin(self, first: int, room: int, can_stop: bool, attempt: int, head_start: int) -> None:
        self.now, self.can_stop = 0.0, can_stop
        self.source, self.target = Pool(NUM_BLOCKS), Pool(room)
        self.to_prefill: deque[Any] = deque()
        self.to_decode: deque[Any] = deque()
        self.said: list[tuple[bool, Any]] = []
        self.moving: list[tuple[Pull, int, int]] = []  # pull, source block, target block
        self.late: list[tuple[int, int]] = []  # writes that could not be stopped
        self.quarantined: list[int] = []
        self.checks: list[Pull] = []
        self.adopted: dict[int, int] = {}
        self.firsts: list[SequenceDelta] = []
        self.finishes: list[str] = []
        self.is_prefill_dead = self.is_decode_dead = self.is_chosen = False
        self.computed: set[int] = set()
        self.has_ended = False
        outer = self

        class Source:
            def say(self, peer: str, note: Any) -> None:
                assert peer == "decode"
                outer.to_decode.append(note)

            def release(self, blocks: list[int]) -> None:
                outer.source.give(blocks)

        class Target:
            def say(self, peer: str, note: Any) -> None:
                assert peer == "prefill"
                outer.to_prefill.append(note)

            def reserve(self, first: int, count: int) -> list[int]:
                return outer.target.take(count)

            def pull(self, owner: Receiving, pull: Pull, attempt: int) -> bool:
                if outer.is_prefill_dead:
                    return False
                outer.moving += [
                    (pull, *pair) for pair in zip(pull.sources, pull.targets, strict=True)
                ]
                return True

            def cancel(self, pull: Pull) -> bool:
                stopped = [move for move in outer.moving if move[0] is pull]
                outer.moving = [move for move in outer.moving if move[0] is not pull]
                if not outer.can_stop:
                    outer.late += [(source, target) for _, source, target in stopped]
                return outer.can_stop

            def check(self, owner: Receiving, pull: Pull) -> None:
                outer.checks.append(pull)

            def adopt(self, first: int, blocks: list[int]) -> None:
                for number, block in enumerate(blocks, first):
                    assert outer.target.content[block] == number, "a wrong block is used"
                    assert number not in outer.adopted
                    outer.adopted[number] = block

            def release(self, blocks: list[int]) -> None:
                outer.target.give(blocks)

            def quarantine(self, peer: str, blocks: list[int]) -> None:
                outer.quarantined += blocks

            def take_first(self, note: First) -> None:
                assert not outer.finishes, "a token of a request that goes on by itself"
                outer.firsts.append(note.token)

            def finish(self, failure: str) -> None:
                outer.finishes.append(failure)

        # The last two are of another group, and so far on their own.
        parts = Parts(
            [range(NUM_BLOCKS - 2), range(NUM_BLOCKS - 4, NUM_BLOCKS - 2)], [2, 3], [0, 0]
        )
        self.sending = Sending(NAME, KEYS, Source(), 0.0, parts)
        want = Want(NAME, attempt, first, NUM_BLOCKS, KEYS[-1])
        self.first, self.attempt = first, attempt
        self.receiving = Receiving(NAME, "prefill", want, Target(), 0.0, 60.0, parts)
        if head_start:
            self.hear_at_prefill(twice=False)
        for number in range(head_start):
            self.compute(1, number)

    # The prefill engine.

    @precondition(lambda self: not self.is_prefill_dead)
    @rule(is_in_order=st.integers(0, 4), number=st.integers(0, NUM_BLOCKS - 1))
    def compute(self, is_in_order: int, number: int) -> None:
        if is_in_order:
            number = next((n for n in range(NUM_BLOCKS) if n not in self.computed), number)
        if number not in self.computed and not self.sending.is_committed:
            self.computed.add(number)
            (block,) = self.source.take(1)
            self.source.content[block] = number
            self.sending.add(number, block, number)

    @precondition(lambda self: not self.is_prefill_dead and not self.is_chosen)
    @rule(dice=st.integers(0, 3))
    def choose(self, dice: int) -> None:
        """The first token, whichever blocks are still being copied and summed."""
        if not dice or len(self.computed) == NUM_BLOCKS:
            self.is_chosen = True
            self.sending.first(FIRST, 0)

    @precondition(lambda self: not self.is_prefill_dead and self.is_chosen)
    @rule(dice=st.integers(0, 3))
    def commit(self, dice: int) -> None:
        if not dice or len(self.computed) == NUM_BLOCKS:
            self.sending.commit()

    def fail(self) -> None:
        if not self.is_prefill_dead:
            self.sending.fail("a step failed")

    def prefill_dies(self) -> None:
        """Its connections break, and nothing of it moves any more."""
        self.is_prefill_dead = True
        self.to_prefill.clear()
        self.moving.clear()
        self.receiving.lose("prefill")

    # Notes: in order, at any time, some twice, and strangers' and old ones among them.

    @precondition(lambda self: self.to_prefill and not self.is_prefill_dead)
    @rule(twice=st.booleans())
    def hear_at_prefill(self, twice: bool) -> None:
        note = self.to_prefill.popleft()
        self.said.append((True, note))
        for _ in range(1 + twice):
            self._to_sending("decode", note)

    @precondition(lambda self: self.to_decode and not self.is_decode_dead)
    @rule(twice=st.booleans())
    def hear_at_decode(self, twice: bool) -> None:
        note = self.to_decode.popleft()
        self.said.append((False, note))
        for _ in range(1 + twice):
            self._to_receiving(note)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def an_old_note_comes_again(self, data: st.DataObject) -> None:
        is_to_prefill, note = data.draw(st.sampled_from(self.said))
        if isinstance(note, Abort | Aborted):
            return  # these mean what they say whenever they come
        if is_to_prefill and not self.is_prefill_dead and not isinstance(note, Accept):
            self._to_sending("decode", note)
        elif not is_to_prefill and not self.is_decode_dead:
            self._to_receiving(note)

    @precondition(lambda self: not self.is_prefill_dead)
    @rule()
    def a_stranger_speaks(self) -> None:
        was = self.sending.is_over
        self.sending.accept("stranger", self.attempt)
        self.sending.aborted("stranger", self.attempt)
        self.sending.hear("stranger", self.attempt, self.now)
        self.sending.lose("stranger")
        assert self.sending.is_over == was

    # Bytes.

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def a_block_arrives(self, data: st.DataObject) -> None:
        self._arrive(data.draw(st.sampled_from(self.moving)))

    def _arrive(self, move: tuple[Pull, int, int]) -> None:
        self.moving.remove(move)
        pull, source, target = move
        assert target in self.target.held, "a block is written to that somebody else has"
        self.target.content[target] = self.source.content[source]
        if not any(other[0] is pull for other in self.moving):
            self.receiving.pulled(pull)

    @precondition(lambda self: self.moving)
    @rule(is_retryable=st.booleans(), dice=st.integers(0, 1))
    def a_transfer_fails(self, is_retryable: bool, dice: int) -> None:
        if dice:
            return
        pull = self.moving[0][0]
        if not self.can_stop:
            pull.is_unsafe = True
            self.late += [move[1:] for move in self.moving if move[0] is pull]
        self.moving = [move for move in self.moving if move[0] is not pull]
        self.receiving.pulled(pull, "no progress", is_retryable=is_retryable)

    @precondition(lambda self: self.late)
    @rule()
    def a_write_comes_late(self) -> None:
        source, target = self.late.pop()
        assert target in self.quarantined, "a late write hits a block that is in use again"
        self.target.content[target] = self.source.content[source]

    @precondition(lambda self: self.quarantined)
    @rule()
    def fence(self) -> None:
        self.late.clear()
        self.target.give(self.quarantined)
        self.quarantined = []

    @precondition(lambda self: self.checks)
    @rule(spoiled=st.integers(0, 5))
    def a_check_ends(self, spoiled: int) -> None:
        pull = self.checks.pop(0)
        if self.receiving.is_over:
            self.receiving.checked(pull, len(pull.targets))
            return
        if not spoiled:
            self.target.content[pull.targets[-1]] = GARBAGE
        good = 0
        for block, checksum in zip(pull.targets, pull.checksums, strict=True):
            if self.target.content[block] != checksum:
                break
            good += 1
        self.receiving.checked(pull, good)

    # The decode engine, and time.

    @rule(
        what=st.sampled_from(["fail", "prefill_dies", "the_request_ends", "decode_dies"]),
        dice=st.integers(0, 9),
    )
    def something_ends(self, what: str, dice: int) -> None:
        if not dice:
            getattr(self, what)()

    def the_request_ends(self) -> None:
        """With its first token, or because its client leaves."""
        self.has_ended = self.has_ended or not self.receiving.is_over
        self.receiving.end()

    def decode_dies(self) -> None:
        if not self.is_decode_dead:
            self.is_decode_dead = True
            self.to_decode.clear()
            self.receiving.give_up("this process ends")
            self.to_prefill.clear()  # nothing that it says now is heard
            if not self.is_prefill_dead:
                self.sending.lose("decode")

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.5, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if not self.is_prefill_dead:
            self.sending.tick(self.now)
        self.receiving.tick(self.now)

    def teardown(self) -> None:
        """However far it came: with time, both are over and nothing is held."""
        if not hasattr(self, "now"):
            return
        while self.to_prefill or self.to_decode or self.moving or self.checks:
            for _ in range(len(self.moving)):
                self._arrive(self.moving[0])
            while self.checks:
                self.a_check_ends(1)
            while self.to_decode and not self.is_decode_dead:
                self.hear_at_decode(twice=False)
            while self.to_prefill and not self.is_prefill_dead:
                self.hear_at_prefill(twice=False)
            if self.is_prefill_dead or self.is_decode_dead:
                break
        for _ in range(4):
            self.now += LEASE_S / 2 + 0.1
            if not self.is_prefill_dead:
                self.sending.tick(self.now)
            self.receiving.tick(self.now)
        self.fence()
        assert len(self.finishes) == 1, "a request goes on exactly once"
        (failure,) = self.finishes
        assert self.firsts in ([], [FIRST]), "the first token comes once"
        assert failure or self.firsts, "committed, and no first token"
        if (
            not failure
            and not self.has_ended
            and self.target.free
            and len(self.target.content) >= NUM_BLOCKS
        ):
            committed = range(self.first, max(self.first, self.sending._total))
            assert set(self.adopted) == set(committed), "not all that was there came"
        assert not self.target.held, "blocks of the decode side are lost"
        if not self.is_prefill_dead:
            assert self.sending.is_over
            assert not self.source.held, "blocks of the prefill side are lost"
        if self.sending.is_accepted:
            assert not failure, "accepted, and yet computed"

    def _to_sending(self, peer: str, note: Any) -> None:
        if isinstance(note, Want):
            self.sending.want(peer, note, self.now)
        elif isinstance(note, Abort):
            self.sending.abort(peer, note.attempt)
        elif isinstance(note, Accept):
            self.sending.accept(peer, note.attempt)
        elif isinstance(note, Aborted):
            self.sending.aborted(peer, note.attempt)
        else:
            self.sending.hear(peer, note.attempt, self.now)

    def _to_receiving(self, note: Any) -> None:
        if isinstance(note, Have):
            self.receiving.have(note, self.now)
        elif isinstance(note, First):
            self.receiving.first(note, self.now)
        elif isinstance(note, Commit):
            self.receiving.commit(note, self.now)
        elif isinstance(note, Abort):
            self.receiving.abort(note)
        elif isinstance(note, Alive):
            self.receiving.hear(note, self.now)


TestHandover = Handover.TestCase
TestHandover.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True
)
