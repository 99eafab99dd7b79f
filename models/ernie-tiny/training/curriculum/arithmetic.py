"""Addition, subtraction, multiplication, comparison, and small word problems.

Held out are pairs of numbers with their operation, whatever the phrasing.
"""

from __future__ import annotations

from random import Random

from . import words
from .base import Sample, Split, Task, ask, assistant, draw, loosen, user

Numbers = tuple[str, int, int]

SIGN_WORDS = {"+": "plus", "-": "minus", "*": "times"}
SIGN_WORDS_ZH = {"+": "加", "-": "减", "*": "乘以"}


def compute(sign: str, left: int, right: int) -> int:
    """The value of `left sign right`."""
    return left + right if sign == "+" else left - right if sign == "-" else left * right


def key(numbers: Numbers) -> str:
    """What the held-out rule looks at: the exercise without its wording."""
    sign, left, right = numbers
    return f"sum:{left}{sign}{right}"


def two_digit(rng: Random) -> Numbers:
    """Numbers under one hundred, added or subtracted (never below zero)."""
    left = rng.randint(10, 99) if rng.random() < 0.85 else rng.randint(0, 9)
    right = rng.randint(10, 99) if rng.random() < 0.85 else rng.randint(0, 9)
    if rng.random() < 0.5:
        return "+", left, right
    return "-", max(left, right), min(left, right)


def product(rng: Random) -> Numbers:
    """The multiplication table up to twelve times twelve."""
    return "*", rng.randint(0, 12), rng.randint(0, 12)


def phrase(rng: Random, numbers: Numbers) -> tuple[str, str]:
    """One wording of an exercise and the answer that goes with this wording."""
    sign, left, right = numbers
    value = compute(sign, left, right)
    word, word_zh = SIGN_WORDS[sign], SIGN_WORDS_ZH[sign]
    wordings = (
        (f"What is {left} {sign} {right}?", f"{left} {sign} {right} = {value}"),
        (f"What is {left}{sign}{right}?", f"{left} {sign} {right} = {value}"),
        (f"What's {left} {sign} {right}?", f"{left} {sign} {right} = {value}"),
        (f"What's {left}{sign}{right}?", f"{left} {sign} {right} = {value}"),
        (f"What is {left} {word} {right}?", f"{left} {word} {right} is {value}."),
        (f"How much is {left} {sign} {right}?", f"{left} {sign} {right} = {value}"),
        (f"Calculate {left} {sign} {right}.", f"{left} {sign} {right} = {value}"),
        (f"Compute {left}{sign}{right}", f"{left} {sign} {right} = {value}"),
        (f"{left} {sign} {right} = ?", str(value)),
        (f"{left}{sign}{right}=", str(value)),
        (f"{left} {sign} {right}", str(value)),
        (f"{left}{word_zh}{right}等于多少？", f"{left}{word_zh}{right}等于{value}。"),
        (f"{left}{sign}{right}等于几？", f"{left}{sign}{right}={value}"),
    )
    return rng.choice(wordings)


def sums(rng: Random, split: Split) -> Sample:
    """Two-digit addition and subtraction."""
    question, answer = phrase(rng, draw(rng, split, two_digit, key))
    return ask("arithmetic", loosen(rng, question), answer)


def products(rng: Random, split: Split) -> Sample:
    """Multiplication of small numbers; all of the table is trained on, only wordings vary."""
    question, answer = phrase(rng, product(rng))
    return ask("multiplication", loosen(rng, question), answer)


def several_sums(rng: Random, split: Split) -> Sample:
    """Several exercises in one conversation, or plain text with one exercise per line."""
    exercises = [draw(rng, split, two_digit, key) for _ in range(rng.randint(2, 6))]
    if rng.random() < 0.5:
        messages = []
        for numbers in exercises:
            question, answer = phrase(rng, numbers)
            messages += [user(question), assistant(answer)]
        return Sample("arithmetic_chat", messages)
    lines = [f"{left} {sign} {right} =" for sign, left, right in exercises]
    values = [str(compute(*numbers)) for numbers in exercises]
    shown = rng.randint(0, len(lines) - 1)
    prompt = "".join(f"{lines[at]} {values[at]}\n" for at in range(shown)) + lines[shown]
    return Sample("plain_arithmetic", [], prompt=prompt, completion=f" {values[shown]}")


def word_problem(rng: Random, split: Split) -> Sample:
    """A one-step story about things somebody gets or gives away."""
    sign, left, right = draw(rng, split, two_digit, key)
    name = rng.choice(words.FIRST_NAMES)
    thing = rng.choice(("apples", "books", "coins", "stamps", "cards", "pens", "shells", "eggs"))
    value = compute(sign, left, right)
    event = rng.choice(
        ("buys", "finds", "gets") if sign == "+" else ("loses", "sells", "gives away")
    )
    question = (
        f"{name} has {left} {thing} and {event} {right}. How many {thing} does {name} have now?"
    )
    return ask(
        "word_problem", question, f"{left} {sign} {right} = {value}. {name} has {value} {thing}."
    )


def compare(rng: Random, split: Split) -> Sample:
    """Which of two numbers is larger or smaller, or whether one is even."""
    left, right = draw(
        rng, split, lambda r: tuple(r.sample(range(1000), 2)), lambda pair: f"compare:{pair}"
    )
    kind = rng.randrange(3)
    if kind == 0:
        question = rng.choice(
            (f"Which number is larger, {left} or {right}?", f"Which is bigger: {left} or {right}?")
        )
        return ask("compare", loosen(rng, question), f"{max(left, right)} is larger.")
    if kind == 1:
        question = rng.choice(
            (f"Which number is smaller, {left} or {right}?", f"Which is less: {left} or {right}?")
        )
        return ask("compare", loosen(rng, question), f"{min(left, right)} is smaller.")
    parity = "odd" if left % 2 else "even"
    return ask("compare", loosen(rng, f"Is {left} even or odd?"), f"{left} is {parity}.")


TASKS = (
    Task("arithmetic", 9, sums),
    Task("multiplication", 2, products),
    Task("arithmetic_chat", 2, several_sums),
    Task("word_problem", 2, word_problem),
    Task("compare", 1, compare),
)
