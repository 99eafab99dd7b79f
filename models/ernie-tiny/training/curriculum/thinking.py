"""Answers after a written train of thought: sums in columns, chains of steps, counted letters."""

from __future__ import annotations

from random import Random

from . import facts, words
from .base import Sample, Split, Task, assistant, draw, loosen, user


def _reasoned(task: str, question: str, reasoning: str, answer: str) -> Sample:
    """A conversation of one question with reasoning before the answer."""
    return Sample(task, [user(question), assistant(answer, reasoning)], thinking=True)


def column_sum(left: int, right: int) -> str:
    """How a sum is done by hand, from the right column to the left one."""
    steps, carry, column = [], 0, 0
    width = max(len(str(left)), len(str(right)))
    for column in range(width):
        first, second = left // 10**column % 10, right // 10**column % 10
        total = first + second + carry
        shown = f"{first} + {second}" + (f" + {carry}" if carry else "")
        carry = total // 10
        steps.append(
            f"{shown} = {total}, write {total % 10}" + (f", carry {carry}." if carry else ".")
        )
    if carry:
        steps.append(f"Write {carry}.")
    return "\n".join([*steps, f"So {left} + {right} = {left + right}."])


def long_sum(rng: Random, split: Split) -> Sample:
    """Three- and four-digit addition."""
    left, right = draw(
        rng,
        split,
        lambda r: (r.randint(100, 9999 if r.random() < 0.3 else 999), r.randint(10, 999)),
        lambda pair: f"long:{pair}",
    )
    question = rng.choice(("What is {} + {}?", "Calculate {} + {}.", "Add {} and {}.")).format(
        left, right
    )
    return _reasoned(
        "thinking",
        loosen(rng, question),
        column_sum(left, right),
        f"{left} + {right} = {left + right}",
    )


def chain(rng: Random, split: Split) -> Sample:
    """Three numbers added and subtracted one after the other."""
    first, second, third, plus = draw(
        rng,
        split,
        lambda r: (r.randint(10, 99), r.randint(1, 50), r.randint(1, 10), r.random() < 0.5),
        lambda content: f"chain:{content}",
    )
    middle = first + second
    value = middle + third if plus else middle - third
    sign = "+" if plus else "-"
    expression = f"{first} + {second} {sign} {third}"
    reasoning = f"{first} + {second} = {middle}\n{middle} {sign} {third} = {value}"
    return _reasoned(
        "thinking", loosen(rng, f"What is {expression}?"), reasoning, f"{expression} = {value}"
    )


def letters(rng: Random, split: Split) -> Sample:
    """How often a letter stands in a word; the thought spells the word first."""
    word, letter = draw(
        rng,
        split,
        lambda r: (r.choice(words.ALL_WORDS), r.choice("aeiorstnl")),
        lambda content: f"occurs:{content}",
    )
    count = word.count(letter)
    marks = "\n".join(f"{char}: {'yes' if char == letter else 'no'}" for char in word)
    noun = "time" if count == 1 else "times"
    question = f"How many times does the letter {letter} occur in {word}?"
    reasoning = f"The word {word} has the letters\n{marks}\nThat makes {count}."
    return _reasoned(
        "thinking",
        loosen(rng, question),
        reasoning,
        f"The letter {letter} occurs {count} {noun} in {word}.",
    )


def sort_steps(rng: Random, split: Split) -> Sample:
    """Sorting by taking the smallest number again and again."""
    numbers = draw(
        rng,
        split,
        lambda r: r.sample(range(100), r.randint(3, 5)),
        lambda content: f"sort:{content}",
    )
    left, steps = list(numbers), []
    while left:
        low = min(left)
        steps.append(f"The smallest of {', '.join(map(str, left))} is {low}.")
        left.remove(low)
    question = f"Sort these numbers: {', '.join(map(str, numbers))}"
    return _reasoned("thinking", question, "\n".join(steps), ", ".join(map(str, sorted(numbers))))


def about_fact(rng: Random, split: Split) -> Sample:
    """A question that needs no thought; the thought says so."""
    sample = facts.fact(rng, split)
    question, answer = sample.messages[0]["content"], sample.messages[1]["content"]
    return _reasoned("thinking_facts", question, f"I know this fact. {answer}", answer)


def thought(rng: Random, split: Split) -> Sample:
    """Any of the exercises above."""
    return rng.choice((long_sum, long_sum, chain, letters, sort_steps))(rng, split)


TASKS = (Task("thinking", 4, thought), Task("thinking_facts", 1, about_fact))
