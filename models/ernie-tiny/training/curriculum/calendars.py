"""Days, months, the clock and units of measure."""

from __future__ import annotations

from random import Random

from . import words
from .base import Sample, Split, Task, ask, draw, loosen

MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
WEEKDAYS_ZH = ("星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期日")
UNITS: tuple[tuple[str, str, int], ...] = (
    ("minutes", "hours", 60),
    ("seconds", "minutes", 60),
    ("hours", "days", 24),
    ("days", "weeks", 7),
    ("months", "years", 12),
    ("centimeters", "meters", 100),
    ("meters", "kilometers", 1000),
    ("grams", "kilograms", 1000),
    ("millimeters", "centimeters", 10),
    ("cents", "dollars", 100),
    ("inches", "feet", 12),
)

MONTH_QUESTIONS = {
    "How many days are in {}?": "days",
    "How many days does {} have?": "days",
    "How long is {}?": "days",
    "Which month comes after {}?": "after",
    "What month follows {}?": "after",
    "What is the next month after {}?": "after",
    "Which month comes before {}?": "before",
    "What month is before {}?": "before",
    "Which month is right before {}?": "before",
    "What number is the month {}?": "number",
    "Which number does the month {} have?": "number",
    "What is the number of the month {}?": "number",
}
"""Wordings with what they ask; held out are pairs of a wording and a month."""


def weekdays(rng: Random, split: Split) -> Sample:
    """A day some days after or before another one."""
    start, steps, forward, wording = draw(
        rng,
        split,
        lambda r: (r.randrange(7), r.randint(1, 7), r.random() < 0.6, r.randrange(4)),
        lambda content: f"weekday:{content}",
    )
    day = words.WEEKDAYS[start]
    result = (start + steps) % 7 if forward else (start - steps) % 7
    if forward and wording == 0:
        question = f"{WEEKDAYS_ZH[start]}之后{steps}天是星期几？"
        return ask("calendar", question, f"{WEEKDAYS_ZH[result]}。")
    side = "after" if forward else "before"
    unit = "day" if steps == 1 else "days"
    if steps == 1 and wording == 1:
        question = f"Which day comes {side} {day}?"
    elif wording == 2:
        question = f"What day is {steps} {unit} {side} {day}?"
    else:
        question = f"Which day is {steps} {unit} {side} {day}?"
    return ask("calendar", loosen(rng, question), f"It is {words.WEEKDAYS[result]}.")


def months(rng: Random, split: Split) -> Sample:
    """The length and the order of the months."""
    wording, at = draw(
        rng,
        split,
        lambda r: (r.choice(list(MONTH_QUESTIONS)), r.randrange(12)),
        lambda content: f"month:{content}",
    )
    month, kind = words.MONTHS[at], MONTH_QUESTIONS[wording]
    answers = {
        "days": f"{month} has {MONTH_DAYS[at]} days.",
        "after": f"{words.MONTHS[(at + 1) % 12]} comes after {month}.",
        "before": f"{words.MONTHS[at - 1]} comes before {month}.",
        "number": f"{month} is month {at + 1}.",
    }
    return ask("calendar", loosen(rng, wording.format(month)), answers[kind])


def clock(rng: Random, split: Split) -> Sample:
    """The time some hours later."""
    hour, minute, later = draw(
        rng,
        split,
        lambda r: (r.randint(0, 23), r.choice((0, 15, 30, 45)), r.randint(1, 12)),
        lambda content: f"clock:{content}",
    )
    unit = "hour" if later == 1 else "hours"
    question = f"It is {hour:02d}:{minute:02d}. What time is it {later} {unit} later?"
    return ask("calendar", loosen(rng, question), f"It is {(hour + later) % 24:02d}:{minute:02d}.")


def units(rng: Random, split: Split) -> Sample:
    """How many of a small unit make up some of a large one."""
    (small, large, factor), count = draw(
        rng,
        split,
        lambda r: (r.choice(UNITS), r.randint(1, 20)),
        lambda content: f"unit:{content[0][0]}:{content[0][1]}:{content[1]}",
    )
    noun = large if count > 1 else {"feet": "foot"}.get(large, large[:-1])
    question = rng.choice(
        ("How many {small} are in {count} {noun}?", "Convert {count} {noun} to {small}.")
    )
    answer = f"{count} {noun} {'are' if count > 1 else 'is'} {count * factor} {small}."
    return ask("units", loosen(rng, question.format(small=small, count=count, noun=noun)), answer)


def calendar(rng: Random, split: Split) -> Sample:
    """A question about days, months or the clock."""
    return rng.choice((weekdays, months, clock))(rng, split)


TASKS = (Task("calendar", 1.5, calendar), Task("units", 1.5, units))
