"""Roles that follow the traffic: on a virtual clock, beside every fixed split and all-mixed."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from fd_router.roles.controller import Decision, Goals, Member, RoleController, StepCost, Work
from simulate_roles import SHIFTING, Fleet, Phase, compare

GOALS = Goals(tpot_s=0.04)


def test_goodput_of_a_trace_that_shifts() -> None:
    """From prompts to answers and back. Steps with a high base cost, where one split is right at a
    time and small chunks are dear."""
    found = compare(SHIFTING, seed=1)
    own = found.pop("controller")
    assert own >= 1.3 * max(found.values()), (own, found)
    offered = sum(phase.seconds * phase.rate for phase in SHIFTING)
    assert own >= 0.8 * offered / sum(phase.seconds for phase in SHIFTING)


@pytest.mark.parametrize("phase", SHIFTING[:2])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_traffic_that_stays_is_served_as_by_the_best_split(phase: Phase, first: int) -> None:
    """From any beginning, once the roles have been found."""
    best = max(Fleet(4, count, 256).run([phase]) for count in (1, 2, 3))
    own = Fleet(4, first, 256).run([phase], RoleController(GOALS))
    assert own >= 0.6 * best  # the first minutes, and what queued up in them, included


def work(steps: float, generated: float, computed: float, costs: tuple[float, ...]) -> Work:
    seconds = sum(n * c for n, c in zip((steps, generated, computed), costs, strict=True))
    return Work(steps, generated, computed, seconds)


@pytest.mark.parametrize(
    "costs", [(0.025, 0.0002, 1 / 8000), (0.002, 1e-5, 1e-6), (0.1, 0.01, 0.001)]
)
def test_costs_are_found(costs: tuple[float, float, float]) -> None:
    rng, cost = random.Random(0), StepCost()
    for _ in range(60):
        cost.forget()
        for _ in range(4):
            steps = rng.randrange(1, 200)
            cost.add(work(steps, steps * rng.randrange(100), rng.randrange(40_000), costs))
        cost.fit()
    assert cost.values == pytest.approx(list(costs), rel=0.1)


class Steady:
    """A fleet whose instances do the same in every interval."""

    def __init__(self, roles: str, make: Callable[[bool], Work]) -> None:
        self.members = [Member(str(n), role == "p", Work()) for n, role in enumerate(roles)]
        self.make, self.now = make, 0.0
        self.controller = RoleController(GOALS)
        self.changes: list[tuple[float, str, bool]] = []

    def interval(self) -> Decision | None:
        self.now += GOALS.interval_s
        decision = self.controller.decide(self.now, self.members)
        after = []
        for one in self.members:
            is_prefill = one.is_prefill
            if decision is not None and decision.change and decision.change[0] == one.name:
                is_prefill = decision.change[1]
                self.changes.append((self.now, one.name, is_prefill))
            more = self.make(is_prefill)
            done = Work(*(a + b for a, b in zip(one.work[:4], more[:4], strict=True)), more.queued)
            after.append(Member(one.name, is_prefill, done))
        self.members = after
        return decision


COSTS = (0.025, 0.0002, 1 / 8000)


def much_prompt(is_prefill: bool) -> Work:
    if is_prefill:
        return work(9, 9, 40_000, COSTS)._replace(queued=5000)
    return work(150, 300, 10_000, COSTS)


def much_answer(is_prefill: bool) -> Work:
    return work(2, 2, 500, COSTS) if is_prefill else work(125, 9000, 0, COSTS)


@pytest.mark.parametrize(("make", "wanted"), [(much_prompt, "pppd"), (much_answer, "dddd")])
@pytest.mark.parametrize("roles", ["dddd", "pddd", "ppdd", "pppd"])
def test_roles_change_one_by_one_and_never_within_the_dwell(
    make: Callable[[bool], Work], wanted: str, roles: str
) -> None:
    fleet = Steady(roles, make)
    for _ in range(100):
        fleet.interval()
    times = [at for at, _, _ in fleet.changes]
    assert all(later - before >= GOALS.dwell_s for before, later in pairwise(times))
    found = sum(one.is_prefill for one in fleet.members)
    assert abs(found - wanted.count("p")) <= 1, fleet.changes
    assert found < len(roles), "somebody answers"
    directions = {is_prefill for _, _, is_prefill in fleet.changes}
    assert len(directions) <= 1, "back and forth"


@pytest.mark.parametrize("step_s", [0.02, 0.6, 5.0])
def test_answers_need_instances_even_where_none_is_as_quick_as_asked(step_s: float) -> None:
    """Eight answers at once on the one instance that writes: a slow machine generates few tokens
    a second, which is no sign of little to do."""
    costs = (step_s, 0.01, 0.0001)
    steps = GOALS.interval_s / (step_s + 8 * 0.01)

    def answers(is_prefill: bool) -> Work:
        return Work() if is_prefill else work(steps, 8 * steps, 0, costs)

    fleet = Steady("pd", answers)
    for _ in range(40):
        fleet.interval()
    assert [one.is_prefill for one in fleet.members] == [False, False]


def test_the_share_moves_before_a_role_does() -> None:
    fleet = Steady("pddd", much_prompt)
    seen: list[Decision] = []
    while not fleet.changes:
        if (decision := fleet.interval()) is not None:
            seen.append(decision)
    assert len(seen) >= 2 and seen[0].change is None and seen[0].mixed_share > 0


def test_a_load_that_swings_around_the_middle_changes_nothing() -> None:
    rng = random.Random(0)

    def make(is_prefill: bool) -> Work:
        factor = rng.choice((0.85, 1.15))
        own = work(9, 9, 36_000, COSTS) if is_prefill else work(125, 7500, 0, COSTS)
        return Work(*(factor * part for part in own))

    fleet = Steady("ppdd", make)
    for _ in range(200):
        fleet.interval()
    assert not fleet.changes


def test_nothing_is_decided_without_traffic_or_a_second_instance() -> None:
    fleet = Steady("pd", lambda _: Work())
    assert [fleet.interval() for _ in range(20)] == [None] * 20
    alone = Steady("d", much_answer)
    assert [alone.interval() for _ in range(20)] == [None] * 20


def test_an_instance_that_starts_anew_says_nothing_for_an_interval() -> None:
    fleet = Steady("pd", much_answer)
    for _ in range(10):
        fleet.interval()
    before = fleet.controller._cost.values.copy()
    fleet.members = [Member(one.name, one.is_prefill, Work()) for one in fleet.members]
    assert fleet.interval() is None
    assert fleet.controller._cost.values == before
