"""How many instances compute prompts for others, and which share of prompts is computed where it is
answered, so that both sides have as much to do as they can do: without any input or output.

Every interval the counters of all instances say what they did and how long it took. From that comes
a cost of a step, of a token generated in it, and of a prompt token. Little's law then gives the
instances that prompts and answers need: prompt tokens a second times the cost of one; tokens
generated a second times the longest allowed time between two, over the largest batch that keeps it;
where even one answer alone takes longer, times what it takes.

Two levers: the share of prompts computed where they are answered, in mixed steps, is changed at
once. The role of an instance is changed only when the share has been too little for a while: one
instance at a time, and not again before `dwell_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

MAX_LOAD: Final = 0.7  # of a side; beyond that requests wait for each other, and roles may change
HYSTERESIS: Final = 0.15  # of an instance, beyond the half that rounds
SHARE_STEP: Final = 0.05  # smaller changes of the share are not made
BACKLOG_S: Final = 30.0  # in which prompts that wait should be computed
SMOOTHING: Final = 0.4  # weight of the newest interval
FORGETTING: Final = 0.95  # of what an interval says about costs, with each one
_PRIOR: Final = (5e-3, 1e-4, 1e-4)  # seconds, until there is something to measure
_PRIOR_WEIGHT: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Goals:
    """What answers should keep: seconds between two tokens. And how often something may change."""

    tpot_s: float
    interval_s: float = 5.0
    dwell_s: float = 60.0
    max_batch: int = 256  # more are not counted on


class Work(NamedTuple):
    """What an instance has done since it started; and what waits there now."""

    steps: float = 0.0
    generated: float = 0.0  # tokens
    computed: float = 0.0  # prompt tokens, without those found in a cache
    seconds: float = 0.0  # in steps
    queued: float = 0.0  # prompt tokens that wait

    def since(self, before: Work) -> Work:
        """What was done after `before`."""
        steps, generated, computed, seconds, _ = (
            now - then for now, then in zip(self, before, strict=True)
        )
        return Work(steps, generated, computed, seconds, self.queued)


@dataclass(frozen=True, slots=True)
class Member:
    """An instance that can have either role."""

    name: str
    is_prefill: bool
    work: Work


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be, and why. change: (instance, whether it is to compute prompts)."""

    mixed_share: float
    change: tuple[str, bool] | None
    reason: str
    prefill_demand: float  # instances
    decode_demand: float


class StepCost:
    """Seconds of a step, of a token generated in it, and of a prompt token: what fits best, none of
    them negative."""

    def __init__(self) -> None:
        self._normal = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self.values = list(_PRIOR)

    def forget(self) -> None:
        """An interval has passed."""
        self._normal = [[FORGETTING * cell for cell in row] for row in self._normal]
        self._right = [FORGETTING * cell for cell in self._right]

    def add(self, done: Work) -> None:
        """What an instance did in an interval."""
        row = (done.steps, done.generated, done.computed)
        for i in range(3):
            self._right[i] += row[i] * done.seconds
            for j in range(3):
                self._normal[i][j] += row[i] * row[j]

    def fit(self) -> None:
        """Least squares, by coordinates."""
        for _ in range(200):
            for i in range(3):
                others = sum(self._normal[i][j] * self.values[j] for j in range(3) if j != i)
                weight = self._normal[i][i] + _PRIOR_WEIGHT / _PRIOR[i] ** 2
                value = self._right[i] + _PRIOR_WEIGHT / _PRIOR[i] - others
                self.values[i] = max(0.0, value / weight)

    def batch(self, goals: Goals) -> float:
        """The largest batch whose steps keep the time between two tokens; at least 1."""
        step_s, token_s, _ = self.values
        fits = (goals.tpot_s - step_s) / token_s if token_s else goals.max_batch
        return min(float(goals.max_batch), max(1.0, fits))

    def tpot(self, goals: Goals) -> float:
        """Seconds between two tokens of an answer: those allowed, or the least there can be."""
        step_s, token_s, _ = self.values
        return max(goals.tpot_s, step_s + token_s)


class RoleController:
    """One fleet's. `decide` is called once an interval."""

    def __init__(self, goals: Goals) -> None:
        self._goals, self._cost = goals, StepCost()
        self._before: dict[str, Work] = {}
        self._last_s: float | None = None  # when decide was called last
        self._demand: tuple[float, float] | None = None
        self._share = 0.0
        self._wants_since: tuple[bool, float] | None = None  # more prefill or less, since when
        self._changed_s = float("-inf")

    def decide(self, now: float, members: Sequence[Member]) -> Decision | None:
        """What is to change; None while there is nothing to go by. now: seconds, by any clock."""
        done = self._done(members)
        passed_s = 0.0 if self._last_s is None else now - self._last_s
        self._last_s = now
        if passed_s <= 0 or len(members) < 2 or not done:
            return None
        self._cost.forget()
        for work in done.values():
            self._cost.add(work)
        self._cost.fit()
        demand = self._measure(done, members, passed_s)
        prompts, answers = demand
        total, num_prefill = prompts + answers, sum(one.is_prefill for one in members)
        if total < 0.02 * len(members):  # idle: what is wanted is not known
            return None
        wanted = len(members) * prompts / total
        share = self._share_for(max(prompts, 1e-9), answers, num_prefill, len(members))
        is_more = wanted > num_prefill
        needed, there = (prompts, num_prefill) if is_more else (answers, len(members) - num_prefill)
        is_due = abs(wanted - num_prefill) >= 0.5 + HYSTERESIS and needed > MAX_LOAD * there
        change = self._change(now, is_more if is_due else None, members)
        reason = (
            f"prompts need {prompts:.2f} and answers {answers:.2f} of {len(members)} instances; "
            f"{num_prefill} compute prompts, {wanted:.2f} would do"
        )
        return Decision(share, change, reason, prompts, answers)

    def _done(self, members: Sequence[Member]) -> dict[str, Work]:
        """What each did since the last call; one that has started anew says nothing."""
        done = {}
        for one in members:
            before = self._before.get(one.name)
            if before is not None and one.work.steps >= before.steps:
                done[one.name] = one.work.since(before)
        self._before = {one.name: one.work for one in members}
        return done

    def _measure(
        self, done: Mapping[str, Work], members: Sequence[Member], passed_s: float
    ) -> tuple[float, float]:
        """(prompts, answers): instances that each needs."""
        computed = sum(work.computed + work.queued * passed_s / BACKLOG_S for work in done.values())
        generated = sum(work.generated for work in done.values())
        goals = self._goals
        now = (
            computed / passed_s * self._cost.values[2],
            generated / passed_s * self._cost.tpot(goals) / self._cost.batch(goals),
        )
        prompts, answers = self._demand or now
        self._demand = (
            prompts + SMOOTHING * (now[0] - prompts),
            answers + SMOOTHING * (now[1] - answers),
        )
        return self._demand

    def _share_for(self, prompts: float, answers: float, num_prefill: int, number: int) -> float:
        """The share of prompts that prefill instances cannot compute soon enough, as far as steps
        of the others have room for it. Where both together cannot, both get as much too much."""
        goals, (step_s, token_s, _), others = self._goals, self._cost.values, number - num_prefill
        full = min(1.0, answers / others) * self._cost.batch(goals) * token_s
        room = others * max(0.0, 1 - (step_s + full) / goals.tpot_s)
        if not num_prefill:
            share = 1.0
        elif prompts - room > num_prefill:
            share = max(0.0, 1 - num_prefill * (prompts + answers) / (number * prompts))
        else:
            share = max(0.0, min(room, prompts - MAX_LOAD * num_prefill)) / prompts
        if abs(share - self._share) >= SHARE_STEP or share in (0.0, 1.0):
            self._share = share
        return self._share

    def _change(
        self, now: float, is_more: bool | None, members: Sequence[Member]
    ) -> tuple[str, bool] | None:
        """The instance whose role changes. is_more: whether to one that computes prompts; None:
        roles are right as they are."""
        able = [one for one in members if one.is_prefill != is_more]
        # Somebody has to answer; that nobody computes prompts for others is possible.
        if is_more is None or len(able) < (2 if is_more else 1):
            self._wants_since = None
            return None
        if self._wants_since is None or self._wants_since[0] != is_more:
            self._wants_since = is_more, now  # the share gets an interval to do what it can
            return None
        if now < self._changed_s + self._goals.dwell_s:
            return None
        chosen = min(able, key=lambda one: (one.work.queued, one.name))
        self._wants_since, self._changed_s = None, now
        return chosen.name, is_more
