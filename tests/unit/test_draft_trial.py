"""Numbers of drafts compared: the fastest wins, what is slow is given up soon, and a trial always
ends."""

from __future__ import annotations

from random import Random

import pytest

from fastdeploy_core.scheduler.draft_trial import (
    BLOCK,
    FEWEST,
    MOST_ROUNDS,
    ROUNDS,
    Load,
    TimedStep,
    Trial,
)


def run(trial: Trial, costs: dict[int, tuple[float, float]]) -> dict[int, int]:
    """Steps that each number was given. costs: seconds and tokens of a step, by number."""
    given = dict.fromkeys(costs, 0)
    while not trial.is_over:
        number = trial.current
        seconds, tokens = costs[number]
        given[number] += 1
        trial.add(TimedStep(tokens, seconds, 0, number > 0))
    return given


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(
    ("costs", "wanted"),
    [
        ({0: (1.0, 1.0), 3: (2.0, 2.3), 1: (1.2, 1.9)}, 1),
        ({0: (1.0, 1.0), 3: (1.4, 2.4), 1: (1.3, 1.6)}, 3),
        ({0: (1.0, 1.0), 3: (3.0, 2.4), 1: (1.7, 1.6)}, 0),
        ({0: (1.0, 1.0), 3: (1.05, 1.1), 1: (1.02, 1.05)}, 0),
    ],
)
def test_the_fastest_number_wins(
    costs: dict[int, tuple[float, float]], wanted: int, first: int
) -> None:
    numbers = (0, 3, 1) if first == 0 else (3, 0, 1)
    trial = Trial(numbers, 8, Load())
    given = run(trial, costs)
    assert trial.best(1.1) == wanted
    for number in filter(given.get, costs):
        seconds, tokens = costs[number]
        assert trial.ratio(number) == pytest.approx(tokens / seconds)


def test_a_quicker_step_with_drafts_is_chance() -> None:
    """Some device was held up whenever no drafts were in turn; what these add to a step is known
    all the same."""
    trial = Trial((0, 3), 8, Load())
    run(trial, {0: (1.0, 1.0), 3: (0.5, 1.2)})
    assert trial.ratio(3) == pytest.approx(2.4)
    assert trial.gain(3) == pytest.approx(1.2)
    assert trial.best(1.25) == 0 and trial.best(1.1) == 3


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_what_is_far_slower_costs_four_steps(rows: int) -> None:
    given = run(Trial((0, 3, 1), rows, Load()), {0: (1.0, 1.0), 3: (2.5, 1.0), 1: (1.5, 1.0)})
    assert given == {0: BLOCK, 3: FEWEST, 1: 0}, "one draft cannot bring more than three that fail"


def test_bad_luck_of_one_row_is_waited_for() -> None:
    """A step with drafts takes a third longer; the row's first four have none that is right."""
    trial, count = Trial((0, 5), 1, Load()), 0
    while not trial.is_over:
        number = trial.current
        count += number == 5
        tokens = 4.0 if number and count > FEWEST else 1.0
        trial.add(TimedStep(tokens, 1.33 if number else 1.0, 0, number > 0))
    assert trial.best(1.1) == 5


@pytest.mark.parametrize("rows", [8, 32])
def test_nobody_wins_by_one_block(rows: int) -> None:
    """By chance one draft is fast for its first twelve steps: three are what pays in the end."""
    trial, count = Trial((0, 3, 1), rows, Load()), 0
    while not trial.is_over:
        number = trial.current
        count += number == 1
        seconds = {0: 1.0, 3: 1.9, 1: 0.9 if count <= BLOCK else 2.0}[number]
        trial.add(TimedStep({0: 1.0, 3: 2.4, 1: 1.5}[number], seconds, 0, number > 0))
    assert trial.best(1.1) == 3


def test_prompts_count_at_their_usual_share() -> None:
    """By chance many more prompts came in the steps with drafts: per token of an answer they cost
    the same."""
    load, trial = Load(), Trial((0, 3), 8, Load())
    trial._load = load
    for _ in range(3000):
        load.note(1.0, 4)  # four tokens of prompts for each token of a row
    for _ in range(ROUNDS):
        for number, apart in ((0, 6), (3, 2)):
            for nth in range(BLOCK):
                if trial.is_over or trial.current != number:
                    break
                seconds, tokens = (2.0, 2.5) if number else (1.0, 1.0)
                step = TimedStep(tokens, seconds, 0, number > 0)
                if nth % apart == 1:
                    step = TimedStep(0.0, 5.0, 40, False)
                trial.add(step)
    # A token takes a decode step's share, and a tenth of a prompt step.
    assert trial.ratio(3) == pytest.approx((1.0 + 0.5) / (0.8 + 0.5), rel=0.02)


@pytest.mark.parametrize("seed", range(60))
def test_a_trial_ends_whatever_it_measures(seed: int) -> None:
    random = Random(seed)
    numbers = random.choice([(0, 5, 2, 1), (5, 0, 2, 1), (0, 1), (3, 0, 1)])
    load, rows = Load(), random.choice([1, 2, 8, 128])
    trial, count = Trial(numbers, rows, load), 0
    while not trial.is_over:
        prompts, number = random.choice([0, 0, 0, 60]), trial.current
        tokens = random.choice([0.0, 1.0, 1.0, 1.0 + number])
        load.note(tokens, prompts)
        step = TimedStep(tokens, random.lognormvariate(-6, 1.5), prompts, number > 0)
        changes = trial.add(step)
        assert changes == (trial.is_over or trial.current != number)
        count += 1
    assert count <= len(numbers) * (MOST_ROUNDS + 1) * BLOCK
    assert trial.best(1.1) in numbers
