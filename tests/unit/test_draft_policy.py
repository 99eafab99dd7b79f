"""The draft policy on engines of given times per step and given acceptance, over a clock that only
steps move: it ends close to the best fixed number, whatever that is and whatever the noise."""

from __future__ import annotations

from math import exp
from random import Random
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_core.config import SpeculativeConfig
from fastdeploy_core.scheduler.draft_policy import SHARE, DraftPolicy

SEEDS = range(8)


def make_policy(most: int, **settings: Any) -> DraftPolicy:
    return DraftPolicy(SpeculativeConfig("ngram", most, **settings))


def decode(asked: int, num_decodes: int = 1, *, has_prompts: bool = False) -> Any:
    """A step, as far as the policy looks at it."""
    return SimpleNamespace(asked=asked, num_decodes=num_decodes, is_decode=not has_prompts)


def tell(policy: DraftPolicy, step: Any, num_tokens: int, seconds: float) -> None:
    """As the batch scheduler does."""
    if not policy.rests(step.num_decodes):
        policy.observe(step, num_tokens, seconds)


class Engine:
    """Steps of `rows` rows whose every draft is right with `chance`, if those before it were."""

    def __init__(
        self,
        costs: dict[int, float],
        chance: float,
        *,
        rows: int = 8,
        entry: float = 0.0,
        noise: float = 0.1,
        drift: float = 0.0,
        seed: int = 0,
    ) -> None:
        """costs: time of a step by the number of drafts. entry: what the first one after steps
        without drafts takes beside that. noise: of each step. drift: of some thirty steps, as other
        work on a host is. One step in fifty is held up by three steps, often."""
        self.costs, self.chance, self._rows = costs, chance, rows
        self._entry, self._noise, self._drift, self._level = entry, noise, drift, 0.0
        self.random = Random(seed)
        self.policy = make_policy(max(costs))
        self._fed = self._wanted = 0
        self.steps: list[tuple[int, float, float]] = []  # drafts fed, seconds without noise, tokens

    def run(self, num_steps: int) -> None:
        """Steps with drafts that the step before has made, and one in flight before it."""
        random = self.random
        for _ in range(num_steps):
            fed, self._fed = self._fed, self._wanted
            self._wanted = self.policy.choose(self._rows)
            seconds = self.costs[max(fed, self._wanted)]
            seconds += self._entry * (self._wanted > 0 and not self._fed)
            tokens = sum(1 + self._right(fed) for _ in range(self._rows))
            self.steps.append((fed, seconds, tokens))
            self._level += random.gauss(0, 0.25 * self._drift) - self._level / 30
            seconds *= exp(self._level) * (1 + self._noise * random.uniform(-1, 1))
            if random.random() < 0.02 and self._noise:
                seconds += random.paretovariate(1.5)
            tell(self.policy, decode(fed), tokens, seconds)

    def _right(self, number: int) -> int:
        count = 0
        while count < number and self.random.random() < self.chance:
            count += 1
        return count

    def speed(self, first: int = 0) -> float:
        """Tokens per second of the steps from the first on."""
        steps = self.steps[first:]
        return sum(step[2] for step in steps) / sum(step[1] for step in steps)

    def best(self) -> float:
        """That of the best fixed number."""
        return max(
            self._rows * sum(self.chance**n for n in range(k + 1)) / cost
            for k, cost in self.costs.items()
        )


WORLDS = {
    "good drafts": ({0: 1.0, 1: 1.15, 3: 1.3}, 0.8),
    "useless drafts": ({0: 1.0, 1: 1.15, 3: 1.3}, 0.0),
    "cheap host": ({0: 1.0, 1: 1.02, 2: 1.04, 5: 1.1}, 0.6),
    "expensive drafter": ({0: 1.0, 1: 2.0, 3: 4.0}, 0.8),
    "one draft pays and three do not": ({0: 1.0, 1: 1.2, 3: 2.4}, 0.8),
    "three drafts pay and one does not": ({0: 1.0, 1: 1.9, 3: 2.0}, 0.8),
}


@pytest.mark.parametrize("rows", [1, 8, 128])
@pytest.mark.parametrize("world", WORLDS)
def test_it_ends_within_three_percent_of_the_best_fixed_number(world: str, rows: int) -> None:
    costs, chance = WORLDS[world]
    shares, wholes = [], []
    for seed in SEEDS:
        engine = Engine(costs, chance, rows=rows, seed=seed)
        engine.run(5000)
        shares.append(engine.speed(3000) / engine.best())
        wholes.append(engine.speed() * costs[0] / rows)
    assert mean(shares) > 0.97, shares
    assert min(wholes) > 0.97, "slower than without drafts, the first steps included"


@pytest.mark.parametrize("world", ["useless drafts", "expensive drafter"])
def test_no_drift_of_the_machine_makes_bad_drafts_look_good(world: str) -> None:
    """Steps take now a quarter longer, now less, for thirty steps or so."""
    costs, chance = WORLDS[world]
    found = []
    for seed in SEEDS:
        engine = Engine(costs, chance, drift=0.25, seed=seed)
        engine.run(5000)
        found.append(engine.speed() / 8)
    assert mean(found) > 0.97, found


def test_it_follows_the_text() -> None:
    """Compared with whoever knows beforehand what the text will be like."""
    costs, shares = WORLDS["good drafts"][0], []
    for seed in SEEDS:
        engine, ideal = Engine(costs, 0.0, rows=4, seed=seed), 0.0
        for chance in (0.0, 0.9, 0.0, 0.9):
            engine.chance = chance
            before = len(engine.steps)
            engine.run(3000)
            ideal += sum(step[2] for step in engine.steps[before:]) / engine.best()
            shares.append(engine.speed(before + 2000) / engine.best())
        assert ideal / sum(step[1] for step in engine.steps) > 0.6
    assert median(shares) > 0.97 and mean(shares) > 0.93, shares


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_steps_that_take_forever_are_few(rows: int) -> None:
    for seed in SEEDS:
        engine = Engine({0: 1.0, 1: 250.0, 3: 250.0}, 0.0, rows=rows, seed=seed)
        engine.run(8000)
        assert 1 <= sum(step[1] > 100 for step in engine.steps) <= 2


@pytest.mark.parametrize("entry", [40.0, 250.0])
def test_what_costs_much_to_begin_with_is_begun_seldom(entry: float) -> None:
    """As drafts on the host are that read what all rows have said."""
    for seed in SEEDS:
        engine = Engine({0: 1.0, 1: 1.6, 3: 1.6}, 0.1, rows=128, entry=entry, seed=seed)
        engine.run(12000)
        num_entries = sum(step[1] > entry for step in engine.steps)
        assert 1 <= num_entries <= 2 + 12000 * SHARE / entry


def probes(policy: DraftPolicy, num_steps: int, **step: Any) -> list[int]:
    """What it asks for; a draft is always right and costs nothing."""
    asked, found = 0, []
    for _ in range(num_steps):
        wanted = policy.choose(4)
        tell(policy, decode(asked, **step), 4 * (1 + asked), 1.0)
        asked = wanted
        found.append(wanted)
    return found


def test_prompts_now_and_then_say_nothing_and_many_are_part_of_the_load() -> None:
    policy, asked = make_policy(1), 0
    for number in range(3000):
        wanted = policy.choose(4)
        # One step in eight has a prompt, and takes a hundred times as long if drafts are asked for.
        has_prompts = not number % 8
        seconds = 100.0 if has_prompts and wanted else 1.0
        tell(policy, decode(asked, has_prompts=has_prompts), 4 * (1 + asked), seconds)
        asked = wanted
    assert asked == 1
    assert probes(make_policy(1), 400, has_prompts=True)[-1] == 1


def test_several_decodes_of_a_step_count_each() -> None:
    """Without drafts a step is four decodes and takes as long as two with one draft."""
    policy, asked, found = make_policy(1), 0, []
    for _ in range(3000):
        wanted = policy.choose(1)
        num_decodes = 1 if asked or wanted else 4
        seconds = 1.0 if wanted else 2.0
        tell(policy, decode(asked, num_decodes), num_decodes + asked, seconds)
        asked = wanted
        found.append(wanted)
    assert 1 in found and found[-1000:].count(1) < 50, "2 tokens a second without, 2 with: no gain"


def test_batch_sizes_and_kinds_are_learned_apart_and_begin_alike() -> None:
    policy = make_policy(1)
    assert probes(policy, 400)[-1] == 1
    assert policy.choose(4) == policy.choose(3) == 1
    assert policy.choose(32) == 1 and policy.choose(32, 2) == 1, "as the size before does"
    assert make_policy(1).choose(32) == 0, "none until something is known"


def test_settings_are_obeyed() -> None:
    fixed = make_policy(3, adaptive_length=False, disable_by_batch_size=8)
    assert [fixed.choose(rows) for rows in (1, 8, 9, 64)] == [3, 3, 0, 0]
    assert fixed.rests(1), "nothing is learned"
    adaptive = make_policy(1, disable_by_batch_size=3)
    assert set(probes(adaptive, 400)) == {0}
