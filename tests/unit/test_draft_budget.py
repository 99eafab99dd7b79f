"""What trials of drafts may cost, on a clock that only steps move: a share of the time and a little
at once, however slow drafts are and whatever the noise; and what wins is found all the same.
"""

from __future__ import annotations

from math import exp
from random import Random
from statistics import mean

import pytest

from fastdeploy_core.scheduler.draft_length import DraftLength

SEEDS = range(12)
# What is promised: this share of the time, and so many steps at once.
SHARE, AT_ONCE = 0.005, 16


class Steps:
    """Of a batch whose steps take 1 without drafts: `costs` and `tokens` of one with so many, and
    `entry` more of the first one behind steps without any."""

    def __init__(
        self,
        rows: int,
        costs: dict[int, float],
        tokens: dict[int, float],
        *,
        entry: float = 0.0,
        noise: float = 0.1,
        drift: float = 0.0,
        held_up: float = 3.0,
        seed: int = 0,
    ) -> None:
        """noise: of each step; drift: what lasts for some thirty steps, as other work on a host
        does. held_up: by how many steps one in fifty is, often."""
        self._rows, self._entry, self._noise = rows, entry, noise
        self._drift, self._held_up, self._level = drift, held_up, 0.0
        self._costs, self._tokens = {0: 1.0, **costs}, {0: 1.0, **tokens}
        self._length = DraftLength(max(costs), numbers=tuple(costs))
        self._random, self._before = Random(seed), 0
        self.lost, self.num_entries = 0.0, 0
        self.asked: list[int] = []

    def run(self, num_steps: int) -> None:
        """Times have a tail."""
        length, random = self._length, self._random
        for _ in range(num_steps):
            asked = 0 if length.rests else length.choose(self._rows)
            is_entry = bool(asked and not self._before)
            self.num_entries += is_entry
            self._before = asked
            taken = self._costs[asked] + is_entry * self._entry
            self.lost += taken - self._tokens[asked]
            self.asked.append(asked)
            self._level += random.gauss(0, 0.25 * self._drift) - self._level / 30
            taken *= exp(self._level) * (1 + self._noise * random.uniform(-1, 1))
            if random.random() < 0.02:
                taken += self._held_up / 3 * random.paretovariate(1.5)
            tokens = self._tokens[asked] * self._rows
            if length.rests:
                length.rests -= 1
            elif not length.passes(round(tokens), 0):
                length.observe(asked, tokens, 0.001 * taken)

    def share(self, number: int, num_steps: int) -> float:
        """Of the last steps, those with so many drafts."""
        return self.asked[-num_steps:].count(number) / num_steps


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("slower", [1.08, 1.5, 3.0, 20.0])
def test_drafts_that_lose_cost_a_share_of_the_time(rows: int, slower: float) -> None:
    """From the first step on; others may be on their way when one has cost enough."""
    for seed in SEEDS:
        steps = Steps(rows, {1: slower, 3: 1.1 * slower}, {1: 1.0, 3: 1.0}, seed=seed)
        for number in range(1, 5):
            steps.run(2000)
            most = 2 * AT_ONCE + 5 * slower + 2 * SHARE * 2000 * number
            assert steps.lost < most, (seed, number)


@pytest.mark.parametrize("entry", [40.0, 250.0])
def test_what_costs_much_to_begin_with_is_begun_seldom(entry: float) -> None:
    """As drafts on the host are that read what all rows have said."""
    for seed in SEEDS:
        steps = Steps(128, {3: 1.6}, {3: 1.2}, entry=entry, seed=seed)
        num_steps = 12000
        steps.run(num_steps)
        assert 1 <= steps.num_entries <= 1 + SHARE * num_steps / (entry - AT_ONCE)


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_steps_that_take_forever_are_two(rows: int) -> None:
    """As those do for which something is made at first use, each for another reason."""
    for seed in SEEDS:
        slow, num_steps = 250.0, 8000
        steps = Steps(rows, {1: slow, 3: slow}, {1: 1.0, 3: 1.0}, seed=seed)
        steps.run(num_steps)
        assert 1 <= len(steps.asked) - steps.asked.count(0) <= 2, seed


def test_many_drafts_that_lose_do_not_keep_one_from_being_tried() -> None:
    found = 0
    for seed in SEEDS:
        steps = Steps(32, {1: 1.2, 3: 4.0}, {1: 1.8, 3: 2.2}, seed=seed)
        steps.run(12000)
        found += steps.share(1, 2000) > 0.8
    assert found > 0.9 * len(SEEDS)


@pytest.mark.parametrize("better", [1, 3])
def test_the_better_one_of_two_numbers_that_win_is_used(better: int) -> None:
    worse = 4 - better
    found = 0
    for seed in SEEDS:
        tokens = {1: 1.9, 3: 2.3}
        costs = {better: tokens[better] / 1.5, worse: tokens[worse] / 1.38}
        steps = Steps(1, costs, tokens, seed=seed, noise=0.2)
        steps.run(3000)
        found += steps.share(better, 1000) > 0.5
    assert found > 0.8 * len(SEEDS)


@pytest.mark.parametrize("rows", [1, 32])
def test_steps_that_are_held_up_do_not_put_off_what_wins_for_long(rows: int) -> None:
    shares = []
    for seed in SEEDS:
        steps = Steps(rows, {1: 1.3, 3: 1.6}, {1: 1.9, 3: 2.2}, held_up=100.0, seed=seed)
        steps.run(4000)
        shares.append(1 - steps.share(0, 4000))
    assert mean(shares) > 0.65, shares


def test_what_costs_much_to_begin_with_and_wins_is_used() -> None:
    shares = []
    for seed in SEEDS:
        steps = Steps(8, {3: 1.2}, {3: 2.0}, entry=60.0, seed=seed)
        steps.run(20000)
        shares.append(steps.share(3, 4000))
    assert mean(shares) > 0.7, shares


@pytest.mark.parametrize(
    ("cost", "tokens", "drift"), [(1.75, 1.5, 0.6), (1.58, 1.5, 0.3), (2.05, 2.0, 0.3)]
)
def test_a_drifting_host_makes_nothing_win_that_loses(
    cost: float, tokens: float, drift: float
) -> None:
    shares = []
    for seed in range(24):
        steps = Steps(32, {1: cost}, {1: tokens}, drift=drift, seed=seed)
        steps.run(4000)
        shares.append(steps.share(1, 4000))
    assert mean(shares) < 0.05, shares


class Answers(Steps):
    """Of 100 steps each, one row at a time or all alike: three in ten are hard to guess."""

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps // 100):
            is_hard = self._random.random() < 0.3
            self._tokens = {0: 1.0, 1: 1.05 if is_hard else 1.8, 5: 1.1 if is_hard else 4.0}
            super().run(100)


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_what_makes_twice_as_fast_is_not_off_for_long(rows: int) -> None:
    """On a drifting host whose steps are held up now and then."""
    num_off = 0
    for seed in range(24):
        steps = Steps(
            *(rows, {1: 1.2, 3: 1.3}, {1: 1.9, 3: 2.6}), drift=0.3, held_up=10.0, seed=seed
        )
        steps.run(2000)
        num_off += steps.share(0, 500) > 0.9
    assert num_off <= 1


@pytest.mark.parametrize("rows", [1, 32])
def test_some_answers_that_are_hard_to_guess_do_not_end_it(rows: int) -> None:
    """What drafts have won pays for trials that come to nothing."""
    num_off, used = 0, []
    for seed in range(16):
        steps = Answers(rows, {1: 1.25, 5: 1.5}, {1: 1.8, 5: 4.0}, drift=0.1, seed=seed)
        steps.run(8000)
        num_off += steps.share(0, 4000) > 0.9
        used.append(1 - steps.share(0, 8000))
    assert num_off <= 1 and mean(used) > 0.45, used
