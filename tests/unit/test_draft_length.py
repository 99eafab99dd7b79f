"""The number of drafts follows what was measured, on simulated batches whose best number is
known."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from fastdeploy_core.scheduler.draft_length import DraftLength

MOST = 5


class World:
    """Steps of `num_rows` rows: each draft is right with the same chance, and costs the same
    time."""

    def __init__(self, length: DraftLength, *, rows: int, chance: float, cost: float) -> None:
        self.length, self.rows, self.chance, self.cost = length, rows, chance, cost
        self.random, self.asked = Random(1), 0
        self.seconds = self.tokens = 0.0
        self.chosen: Counter[int] = Counter()

    def step(self) -> None:
        asked = self.asked
        self.asked = 0 if self.length.rests else self.length.choose(self.rows)
        self.chosen[asked] += 1
        right = []
        for _ in range(self.rows):
            count = 0
            while count < asked and self.random.random() < self.chance:
                count += 1
            right.append(count)
        seconds = (1.0 + self.cost * asked) * self.random.uniform(0.97, 1.03)
        self.seconds += seconds
        self.tokens += sum(right) + self.rows
        if self.length.rests:
            self.length.rests -= 1
        elif not self.length.passes(sum(right) + self.rows, 0):
            self.length.observe(asked, sum(right) + self.rows, seconds)

    def run(self, num_steps: int) -> Counter[int]:
        self.chosen.clear()
        for _ in range(num_steps):
            self.step()
        return self.chosen

    def speed(self, number: int) -> float:
        tokens = sum(self.chance**place for place in range(number + 1))
        return tokens / (1.0 + self.cost * number)

    def best(self) -> float:
        return max(self.speed(number) for number in range(MOST + 1))


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize(
    ("chance", "cost"),
    [(0.95, 0.02), (0.9, 0.2), (0.6, 0.1), (0.5, 0.5), (0.1, 0.3), (0.0, 0.05), (0.3, 0.4)],
)
def test_it_comes_close_to_the_best_number(rows: int, chance: float, cost: float) -> None:
    world = World(DraftLength(MOST), rows=rows, chance=chance, cost=cost)
    world.run(200)
    chosen = world.run(800)
    speed = sum(world.speed(n) / (1 / count) for n, count in chosen.items()) / 800
    assert speed > 0.93 * world.best(), chosen


@pytest.mark.parametrize(("chance", "cost"), [(0.0, 0.4), (0.2, 0.5), (0.05, 0.1)])
def test_it_never_costs_more_than_three_percent(chance: float, cost: float) -> None:
    """From the first step on, the first trial included."""
    for num_steps in (800, 4000):
        world = World(DraftLength(MOST), rows=32, chance=chance, cost=cost)
        world.run(num_steps)
        assert world.tokens / world.seconds > 0.97 * world.rows


def test_it_follows_a_change_of_text() -> None:
    world = World(DraftLength(MOST), rows=8, chance=0.0, cost=0.1)
    assert world.run(300)[0] > 270
    world.chance = 0.95
    world.run(6000)
    assert world.run(300)[MOST] > 200
    world.chance = 0.0
    world.run(300)
    assert world.run(300)[0] > 250


def test_each_batch_size_has_its_own_number() -> None:
    length = DraftLength(MOST)
    small = World(length, rows=2, chance=0.7, cost=0.02)
    large = World(length, rows=120, chance=0.7, cost=0.9)
    for _ in range(20):
        small.run(40)
        large.run(40)
    assert small.run(40).most_common(1)[0][0] >= 3
    assert large.run(40).most_common(1)[0][0] == 0


def test_a_batch_size_never_seen_begins_as_the_nearest_one_that_is_known() -> None:
    length = DraftLength(MOST)
    assert length.choose(8) == 0 and not length.is_off, "it begins with a trial"
    World(length, rows=8, chance=0.0, cost=0.5).run(60)
    assert length.is_off
    for rows in (3, 100):
        assert length.choose(rows) == 0 and length.is_off
    hopeful = World(length, rows=100, chance=0.95, cost=0.01)
    hopeful.run(2000)
    assert hopeful.run(100).most_common(1)[0][0] >= 3, "it is tried all the same"


@pytest.mark.parametrize(("rows", "untried"), [(30, 200), (200, 20)])
def test_drafts_that_pay_are_used_by_batch_sizes_not_seen_yet(rows: int, untried: int) -> None:
    """By fewer rows, as a batch has while it ends, without a trial for some hundred steps; by more
    rows until one, which is soon."""
    length = DraftLength(MOST)
    known = World(length, rows=100, chance=0.95, cost=0.01)
    known.run(400)
    best = known.run(20).most_common(1)[0][0]
    assert best >= 3
    other = World(length, rows=rows, chance=0.95, cost=0.01)
    other.asked = length.choose(rows)
    assert set(other.run(untried)) == {best}
    assert 0 in other.run(400), "it is tried all the same"


def test_limits_hold_without_adapting() -> None:
    fixed = DraftLength(3, adaptive=False, disable_above=4)
    assert [fixed.choose(rows) for rows in (0, 1, 4, 5, 100)] == [0, 3, 3, 0, 0]
    for _ in range(50):
        fixed.observe(3, 2, 9.0)
    assert fixed.choose(2) == 3
    assert DraftLength(3, disable_above=4).choose(5) == 0


def test_the_same_measurements_give_the_same_numbers() -> None:
    runs = []
    for _ in range(2):
        world = World(DraftLength(MOST), rows=8, chance=0.5, cost=0.2)
        numbers = []
        for _ in range(500):
            world.step()
            numbers.append(world.asked)
        runs.append(numbers)
    assert runs[0] == runs[1]
