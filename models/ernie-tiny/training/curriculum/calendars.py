"""Days, months, the clock and units of measure."""

from __future__ import annotations

from random import Random

from . import words
from .base import Sample, Split, Task, ask, draw, loosen

MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
WEEKDAYS_ZH = ("星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期日")
UNITS: tuple[tuple[str, str, int], ...] = (
    ("minutes", "hours", 60), ("seconds", "minutes", 60), ("hours", "days", 24),
    ("days", "weeks", 7), ("months", "years", 12), ("centimeters", "meters", 100),
    ("meters", "kilometers", 1000), ("grams", "kilograms", 1000), ("millimeters", "centimeters", 10),
    ("cents", "dollars", 100), ("inches", "feet", 12),
)


def weekdays(rng: Random, split: Split) -> Sample:
    """A day some days after or before another one."""
    start, steps, forward = draw(
        rng, split,
        lambda r: (r.randrange(7), r.randint(1, 7), r.random() < 0.6),
        lambda content: f"weekday:{content}",
    )
    day = words.WEEKDAYS[start]
    result = (start + steps) % 7 if forward else (start - steps) % 7
    if forward and rng.random() < 0.2:
        question = f"{WEEKDAYS_ZH[start]}之后{steps}天是星期几？"
        return ask("calendar", question, f"{WEEKDAYS_ZH[result]}。")
    if steps == 1 and rng.random() < 0.5:
        question = f"Which day comes {'after' if forward else 'before'} {day}?"
    else:
        unit = "day" if steps == 1 else "days"
        question = f"Which day is {steps} {unit} {'after' if forward else 'before'} {day}?"
    return ask("calendar", loosen(rng, question), f"It is {words.WEEKDAYS[result]}.")


def months(rng: Random, split: Split) -> Sample:
    """The length and the order of the months."""
    kind, at = draw(
        rng, split, lambda r: (r.randrange(4), r.randrange(12)), lambda content: f"month:{content}"
    )
    month = words.MONTHS[at]
    if kind == 0:
        return ask("calendar", loosen(rng, f"How many days are in {month}?"), f"{month} has {MONTH_DAYS[at]} days.")
    if kind == 1:
        return ask("calendar", loosen(rng, f"Which month comes after {month}?"), f"{words.MONTHS[(at + 1) % 12]} comes after {month}.")
    if kind == 2:
        return ask("calendar", loosen(rng, f"Which month comes before {month}?"), f"{words.MONTHS[at - 1]} comes before {month}.")
    return ask("calendar", loosen(rng, f"What number is the month {month}?"), f"{month} is month {at + 1}.")


def clock(rng: Random, split: Split) -> Sample:
    """The time some hours later."""
    hour, minute, later = draw(
        rng, split,
        lambda r: (r.randint(0, 23), r.choice((0, 15, 30, 45)), r.randint(1, 12)),
        lambda content: f"clock:{content}",
    )
    unit = "hour" if later == 1 else "hours"
    question = f"It is {hour:02d}:{minute:02d}. What time is it {later} {unit} later?"
    return ask("calendar", loosen(rng, question), f"It is {(hour + later) % 24:02d}:{minute:02d}.")


def units(rng: Random, split: Split) -> Sample:
    """How many of a small unit make up some of a large one."""
    (small, large, factor), count = draw(
        rng, split,
        lambda r: (r.choice(UNITS), r.randint(1, 20)),
        lambda content: f"unit:{content[0][0]}:{content[0][1]}:{content[1]}",
    )
    noun = large if count > 1 else {"feet": "foot"}.get(large, large[:-1])
    question = rng.choice(("How many {small} are in {count} {noun}?", "Convert {count} {noun} to {small}."))
    answer = f"{count} {noun} {'are' if count > 1 else 'is'} {count * factor} {small}."
    return ask("units", loosen(rng, question.format(small=small, count=count, noun=noun)), answer)


def calendar(rng: Random, split: Split) -> Sample:
    """A question about days, months or the clock."""
    return rng.choice((weekdays, months, clock))(rng, split)


TASKS = (Task("calendar", 1.5, calendar), Task("units", 1.5, units))
