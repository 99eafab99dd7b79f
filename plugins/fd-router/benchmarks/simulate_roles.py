"""Roles that follow the traffic, beside roles that do not: a fleet on a virtual clock.

    python benchmarks/simulate_roles.py

Instances step like engines: a step costs a base, a part for every answer in it and a part for every
prompt token. The traffic shifts from long prompts with short answers to the reverse, and back.
Printed is goodput: requests a second that kept both goals, for every fixed number of prefill
instances, for all-mixed with several sizes of a prompt's chunk, and for the controller
(fd_router/roles/controller.py) from the worst beginning.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field

from fd_router.roles.controller import Goals, Member, RoleController, Work

STEP_S, TOKEN_S, PROMPT_S = 0.025, 0.0002, 1 / 8000
HANDOVER_S = 0.02
TTFT_S, TPOT_S = 2.0, 0.04
MAX_BATCH = 128
PREFILL_CHUNK = 4096


@dataclass(frozen=True)
class Phase:
    """Traffic for a while."""

    seconds: float
    rate: float  # requests a second
    prompt: int  # tokens, on average
    answer: int


@dataclass
class Request:
    """One request on its way."""

    came_s: float
    prompt: int
    answer: int
    left: int = 0  # prompt tokens to compute
    num_done: int = 0  # tokens of the answer
    first_s: float = 0.0
    answers: Instance | None = None  # who writes the answer

    def is_good(self, now: float) -> bool:
        """Whether it kept both goals."""
        per_token = (now - self.first_s) / max(1, self.answer - 1)
        return self.first_s - self.came_s <= TTFT_S and per_token <= TPOT_S


@dataclass
class Instance:
    """An engine: some answers and a chunk of prompts a step."""

    name: str
    is_prefill: bool = False
    prompts: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    is_busy: bool = False
    work: Work = field(default_factory=Work)

    @property
    def queued(self) -> int:
        """Prompt tokens that wait."""
        return sum(request.left for request in self.prompts)


class Fleet:
    """Instances and the requests among them. `share`: of prompts, computed where answered."""

    def __init__(self, number: int, num_prefill: int, chunk: int, seed: int = 0) -> None:
        self.instances = [Instance(f"i{n}", n < num_prefill) for n in range(number)]
        self.chunk, self.share = chunk, 0.0
        self.num_good = self.num_done = 0
        self._events: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._rng = random.Random(seed)
        self._controller: RoleController | None = None

    def run(self, phases: list[Phase], controller: RoleController | None = None) -> float:
        """Goodput, requests a second."""
        self._controller, start = controller, 0.0
        for phase in phases:
            at = start
            while (at := at + self._rng.expovariate(phase.rate)) < start + phase.seconds:
                prompt = max(16, round(self._rng.gauss(phase.prompt, phase.prompt / 4)))
                answer = max(2, round(self._rng.gauss(phase.answer, phase.answer / 4)))
                self._at(at, Request(at, prompt, answer, left=prompt))
            start += phase.seconds
        if controller is not None:
            for number in range(int(start / 5)):
                self._at(5.0 * number, controller)
        while self._events and self._events[0][0] < start + 30:
            now, _, what = heapq.heappop(self._events)
            if isinstance(what, Request):
                self._arrive(now, what)
            elif isinstance(what, RoleController):
                self._control(now, what)
            else:
                what(now)  # type: ignore[operator]
        return self.num_good / start

    def _at(self, when: float, what: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def _arrive(self, now: float, request: Request) -> None:
        able = [one for one in self.instances if not one.is_prefill] or self.instances
        prefill = [one for one in self.instances if one.is_prefill]
        request.answers = min(able, key=lambda one: len(one.running) + len(one.prompts))
        is_mixed = not prefill or self._rng.random() < self.share
        place = request.answers if is_mixed else min(prefill, key=lambda one: one.queued)
        place.prompts.append(request)
        self._start(now, place)

    def _start(self, now: float, one: Instance) -> None:
        """Begin a step, if there is something to do."""
        if one.is_busy or not (one.prompts or one.running):
            return
        one.is_busy = True
        batch = one.running[:MAX_BATCH]
        room = PREFILL_CHUNK if one.is_prefill and not batch else self.chunk
        parts = []
        for request in one.prompts:
            part = min(room, request.left)
            if part:
                parts.append((request, part))
                room -= part
        num_prompt = sum(part for _, part in parts)
        seconds = STEP_S + TOKEN_S * len(batch) + PROMPT_S * num_prompt

        def end(now: float) -> None:
            one.is_busy = False
            num_first = 0
            for request, part in parts:
                request.left -= part
                if not request.left:
                    num_first += 1
                    one.prompts.remove(request)
                    request.first_s, request.num_done = now, 1
                    delay = 0.0 if request.answers is one else HANDOVER_S
                    self._at(now + delay, lambda when, r=request: self._join(when, r))
            for request in batch:
                request.num_done += 1
                if request.num_done >= request.answer:
                    one.running.remove(request)
                    self._finish(now, request)
            done = (1, len(batch) + num_first, num_prompt, seconds)
            pairs = zip(one.work[:4], done, strict=True)
            one.work = Work(*(old + new for old, new in pairs))
            self._start(now, one)

        self._at(now + seconds, end)

    def _join(self, now: float, request: Request) -> None:
        """Its prompt is computed, and its blocks are where its answer is written."""
        place = request.answers
        assert place is not None
        place.running.append(request)
        self._start(now, place)

    def _finish(self, now: float, request: Request) -> None:
        self.num_done += 1
        self.num_good += request.is_good(now)

    def _control(self, now: float, controller: RoleController) -> None:
        members = [
            Member(one.name, one.is_prefill, one.work._replace(queued=one.queued))
            for one in self.instances
        ]
        decision = controller.decide(now, members)
        if decision is None:
            return
        self.share = decision.mixed_share
        if decision.change is not None:
            name, is_prefill = decision.change
            next(one for one in self.instances if one.name == name).is_prefill = is_prefill


# Seconds, requests a second, prompt and answer tokens.
SHIFTING = [Phase(400, 4.0, 4000, 50), Phase(400, 6.0, 300, 500), Phase(400, 4.0, 4000, 50)]


def compare(phases: list[Phase], number: int = 4, seed: int = 0) -> dict[str, float]:
    """Goodput of each way; number: instances."""
    found = {
        f"{count} of {number} compute prompts": Fleet(number, count, 256, seed).run(phases)
        for count in range(1, number)
    }
    for chunk in (128, 256, 512, 1024):
        found[f"all mixed, chunks of {chunk}"] = Fleet(number, 0, chunk, seed).run(phases)
    goals = Goals(TPOT_S, max_batch=MAX_BATCH)
    found["controller"] = Fleet(number, 1, 256, seed).run(phases, RoleController(goals))
    return found


def main() -> None:
    """Print."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    total = sum(phase.seconds * phase.rate for phase in SHIFTING)
    offered = total / sum(phase.seconds for phase in SHIFTING)
    print(f"goodput, requests/s, of {offered:.2f} offered; TTFT {TTFT_S} s, TPOT {TPOT_S} s")
    for name, goodput in compare(SHIFTING).items():
        print(f"{name:32} {goodput:6.2f}")


if __name__ == "__main__":
    main()
