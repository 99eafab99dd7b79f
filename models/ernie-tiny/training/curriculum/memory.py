"""Recall: facts from earlier turns of a conversation, and keys hidden in a long text."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from . import arithmetic, chatter, facts, words
from .base import Message, Sample, Split, Task, assistant, draw, loosen, user

Detail = tuple[str, Callable[[Random], str], str, str, tuple[str, ...], str]
"""A personal detail: its name, how to draw it, how it is told, the reply, questions, the answer."""

DETAILS: tuple[Detail, ...] = (
    (
        "name",
        lambda rng: (
            rng.choice(words.FIRST_NAMES) if rng.random() < 0.7 else words.made_up_name(rng)
        ),
        "My name is {}.",
        "Nice to meet you, {}!",
        ("What is my name?", "Do you remember my name?", "Who am I?"),
        "Your name is {}.",
    ),
    (
        "color",
        lambda rng: rng.choice(words.COLOURS),
        "My favorite color is {}.",
        "{} is a nice color.",
        ("What is my favorite color?", "Which color do I like?"),
        "Your favorite color is {}.",
    ),
    (
        "pet",
        lambda rng: f"{rng.choice(words.ANIMALS)} named {words.made_up_name(rng)}",
        "I have a {}.",
        "A {}! How nice.",
        ("What pet do I have?", "Which pet do I have?"),
        "You have a {}.",
    ),
    (
        "city",
        lambda rng: rng.choice(words.CITIES),
        "I live in {}.",
        "{} is a nice city.",
        ("Where do I live?", "Which city do I live in?"),
        "You live in {}.",
    ),
    (
        "job",
        lambda rng: rng.choice(words.JOBS),
        "I work as a {}.",
        "Being a {} is a good job.",
        ("What is my job?", "What do I work as?"),
        "You work as a {}.",
    ),
    (
        "number",
        lambda rng: str(rng.randint(10, 99999)),
        "My lucky number is {}.",
        "I will remember the number {}.",
        ("What is my lucky number?", "Tell me my lucky number."),
        "Your lucky number is {}.",
    ),
    (
        "code",
        words.code,
        "Remember this code: {}",
        "I will remember the code {}.",
        ("What was the code?", "Which code did I tell you?", "Repeat the code."),
        "The code is {}.",
    ),
    (
        "age",
        lambda rng: str(rng.randint(5, 99)),
        "I am {} years old.",
        "{} is a good age.",
        ("How old am I?", "What is my age?"),
        "You are {} years old.",
    ),
    (
        "fruit",
        lambda rng: rng.choice(words.FRUITS),
        "I like to eat {}.",
        "{} is tasty.",
        ("What do I like to eat?", "Which fruit do I like?"),
        "You like to eat {}.",
    ),
    (
        "name_zh",
        lambda rng: rng.choice(("小明", "小红", "小华", "小李", "小王", "小张", "小美", "小刚")),
        "我叫{}。",
        "很高兴认识你，{}！",
        ("我叫什么名字？", "你记得我的名字吗？"),
        "你叫{}。",
    ),
)


def _distraction(rng: Random) -> list[Message]:
    """An exchange that has nothing to do with what is to be remembered."""
    kind = rng.randrange(3)
    if kind == 0:
        question, answer = arithmetic.phrase(
            rng, draw(rng, "train", arithmetic.two_digit, arithmetic.key)
        )
        return [user(question), assistant(answer)]
    if kind == 1:
        return facts.fact(rng, "train").messages
    phrasings, answer = rng.choice(chatter.EXCHANGES)
    return [user(rng.choice(phrasings)), assistant(answer)]


def recall(rng: Random, split: Split) -> Sample:
    """Tell one to four details, talk about other things, ask for the details again."""

    def tell(rng: Random) -> list[tuple[Detail, str]]:
        chosen = rng.sample(DETAILS, rng.randint(1, 4))
        return [(detail, detail[1](rng)) for detail in chosen]

    told = draw(rng, split, tell, lambda content: f"recall:{[(d[0], v) for d, v in content]}")
    messages: list[Message] = []
    if rng.random() < 0.35:
        text = " ".join(detail[2].format(value) for detail, value in told)
        messages += [user(text), assistant("Thank you, I will remember that.")]
    else:
        for detail, value in told:
            shown = value[0].upper() + value[1:] if detail[3].startswith("{}") else value
            messages += [user(detail[2].format(value)), assistant(detail[3].format(shown))]
            if rng.random() < 0.2:
                messages += _distraction(rng)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        messages += _distraction(rng)
    questions = rng.sample(told, rng.randint(1, len(told)))
    for detail, value in questions:
        messages += [user(loosen(rng, rng.choice(detail[4]))), assistant(detail[5].format(value))]
    return Sample("recall", messages)


FILLERS = (
    "The {adjective} {noun} {verb} the {other}.",
    "A {noun} stands in the {place}.",
    "In the {place} there is a {adjective} {noun}.",
    "{name} {verb} a {noun} near the {place}.",
    "The {noun} is {adjective}.",
    "{name} lives in {city}.",
    "There are {number} {adjective} things in the {place}.",
)


def filler(rng: Random) -> str:
    """A sentence that says nothing of importance."""
    return rng.choice(FILLERS).format(
        adjective=rng.choice(words.ADJECTIVES),
        noun=rng.choice(words.NOUNS),
        other=rng.choice(words.NOUNS),
        verb=rng.choice(words.VERBS),
        place=rng.choice(words.PLACES),
        name=rng.choice(words.FIRST_NAMES),
        city=rng.choice(words.CITIES),
        number=rng.randint(2, 999),
    )


NEEDLES: tuple[tuple[str, str, str], ...] = (
    ("The key of the {} is {}.", "What is the key of the {}?", "The key of the {} is {}."),
    ("The code for {} is {}.", "What is the code for {}?", "The code for {} is {}."),
    (
        "The secret number of {} is {}.",
        "What is the secret number of {}?",
        "The secret number of {} is {}.",
    ),
    ("{}: {}", "What is the value of {}?", "{}: {}"),
    ("Remember that {} means {}.", "What does {} mean?", "{} means {}."),
)


def needle(
    rng: Random, split: Split, sentences: int, task: str, questions: int | None = None
) -> Sample:
    """Hide keys between `sentences` filler sentences and ask for some of them."""

    def hide(rng: Random) -> list[tuple[str, str]]:
        names = rng.sample(words.NOUNS, rng.randint(1, 8))
        return [(name, words.code(rng)) for name in names]

    hidden = draw(rng, split, hide, lambda content: f"needle:{content}")
    statement, question, answer = rng.choice(NEEDLES)
    lines = [filler(rng) for _ in range(sentences)]
    for name, secret in hidden:
        lines.insert(rng.randint(0, len(lines)), statement.format(name, secret))
    text = rng.choice((" ", "\n")).join(lines)
    asked = rng.sample(hidden, min(len(hidden), questions or rng.randint(1, 6)))
    messages: list[Message] = []
    for at, (name, secret) in enumerate(asked):
        content = question.format(name)
        if at == 0:
            content = f"{text}\n\n{content}" if rng.random() < 0.7 else f"{content}\n\n{text}"
        messages += [user(content), assistant(answer.format(name, secret))]
    return Sample(task, messages)


def short_needle(rng: Random, split: Split) -> Sample:
    """Keys in a text of up to about three hundred tokens."""
    return needle(rng, split, rng.randint(0, 18), "find_key")


def long_needle(rng: Random, split: Split) -> Sample:
    """Keys in a text of up to about four thousand tokens; in training now and then longer."""
    if split == "test":
        return needle(rng, split, rng.randint(60, 235), "find_key_4k", questions=1)
    top = 420 if rng.random() < 0.12 else 240
    return needle(rng, split, int(18 * (top / 18) ** rng.random()), "find_key_4k", questions=8)


def very_long_needle(rng: Random, split: Split) -> Sample:
    """Keys in a text of about six to eight thousand tokens."""
    return needle(
        rng, split, rng.randint(320, 400), "find_key_8k", questions=1 if split == "test" else 8
    )


TASKS = (
    Task("recall", 5, recall),
    Task("find_key", 3, short_needle),
    Task("find_key_4k", 1.2, long_needle),
    Task("find_key_8k", 0.05, very_long_needle),
)
