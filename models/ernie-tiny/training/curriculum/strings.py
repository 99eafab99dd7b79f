"""Copying, reversing, spelling and counting."""

from __future__ import annotations

from random import Random

from . import tables, words
from .base import Sample, Split, Task, ask, draw, english_list, loosen

COPY_ORDERS = (
    "Repeat after me: {}",
    "Copy this text: {}",
    "Copy this text exactly: {}",
    "Say: {}",
    "Repeat this: {}",
    "Echo: {}",
    "Write this again: {}",
    "Please repeat: {}",
    "Repeat the following text:\n{}",
    'Say "{}"',
    "Say {}",
    "Please say: {}",
    "Copy the line below.\n{}",
    "请重复：{}",
    "请复述：{}",
)


def _sentence_text(rng: Random) -> str:
    """A short sentence of listed words, sometimes with a name or a number."""
    parts = [rng.choice(words.ALL_WORDS) for _ in range(rng.randint(2, 12))]
    if rng.random() < 0.3:
        parts[rng.randrange(len(parts))] = words.person(rng)
    if rng.random() < 0.3:
        parts[rng.randrange(len(parts))] = str(rng.randint(0, 9999))
    text = " ".join(parts)
    if rng.random() < 0.4:
        text = text[0].upper() + text[1:] + rng.choice(".!?")
    return text


def _symbols_text(rng: Random) -> str:
    """A string without meaning: codes, mixed case, punctuation."""
    alphabet = (
        words.LETTERS
        + words.LETTERS.upper()
        + "0123456789"
        + "0123456789"
        + "-_.:/#@+*()[]{}!?,;='\"<>&%$"
    )
    pieces = [
        "".join(rng.choice(alphabet) for _ in range(rng.randint(2, 8)))
        for _ in range(rng.randint(1, 4))
    ]
    return " ".join(pieces)


def copy_text(rng: Random) -> str:
    """Something to copy."""
    dice = rng.random()
    if dice < 0.5:
        return _sentence_text(rng)
    if dice < 0.65:
        return " ".join(words.made_up_word(rng) for _ in range(rng.randint(1, 8)))
    if dice < 0.8:
        return " ".join(str(rng.randint(0, 999)) for _ in range(rng.randint(1, 12)))
    if dice < 0.9:
        return _symbols_text(rng)
    return "".join(rng.choice(words.CHINESE_WORDS) for _ in range(rng.randint(1, 8)))


def copying(rng: Random, split: Split) -> Sample:
    """Repeat a text exactly."""
    text = draw(rng, split, copy_text, lambda content: f"copy:{content}")
    return ask("copying", rng.choice(COPY_ORDERS).format(text), text)


def plain_copy(rng: Random, split: Split) -> Sample:
    """A plain text in which a line comes back, to be continued to the end of the line."""
    text = draw(rng, split, _sentence_text, lambda content: f"copy:{content}")
    cut = rng.randint(1, len(text.split()) - 1)
    head = " ".join(text.split()[:cut])
    count = rng.randint(1, 3)
    return Sample("plain_copy", [], prompt=f"{text}\n" * count + head, completion=text[len(head) :])


def reversing(rng: Random, split: Split) -> Sample:
    """Turn around a list of words or numbers, or the characters of a word or number."""
    kind = rng.randrange(3)
    if kind == 0:
        items = draw(
            rng,
            split,
            lambda r: [r.choice(words.ALL_WORDS) for _ in range(r.randint(3, 8))],
            lambda content: f"reverse:{content}",
        )
        question = rng.choice(
            (
                "Reverse this list: {}",
                "Write these words in reverse order: {}",
                "Reverse the order: {}",
            )
        ).format(", ".join(items))
        return ask("reversing", question, ", ".join(items[::-1]))
    if kind == 1:
        digits = draw(
            rng,
            split,
            lambda r: "".join(r.choice("0123456789") for _ in range(r.randint(3, 10))),
            lambda content: f"reverse:{content}",
        )
        question = rng.choice(("Reverse the digits of {}.", "Write {} backwards.")).format(digits)
        return ask("reversing", loosen(rng, question), digits[::-1])
    letters = draw(
        rng,
        split,
        lambda r: " ".join(r.choice(words.LETTERS) for _ in range(r.randint(3, 8))),
        lambda content: f"reverse:{content}",
    )
    return ask("reversing", f"Reverse the letters: {letters}", letters[::-1])


def spelling(rng: Random, split: Split) -> Sample:
    """Spell a word letter by letter, or put letters together.

    Made-up words are held out; the listed words are all trained on, because a word that is one
    token can only be spelled by somebody who has seen it spelled.
    """
    if split == "test" or rng.random() < 0.5:
        word = draw(rng, split, words.made_up_word, lambda content: f"spell:{content}")
    else:
        word = rng.choice(words.ALL_WORDS + words.FIRST_NAMES + words.CITIES)
    spelled = " ".join(word)
    if rng.random() < 0.35:
        question = rng.choice(
            ("Which word is spelled {}?", "Join the letters {}.", "Put together: {}")
        )
        return ask("spelling", question.format(spelled), word)
    question = rng.choice(
        ("Spell {}.", "Spell the word {}.", "How do you spell {}?", "Write {} letter by letter.")
    )
    return ask("spelling", question.format(word), spelled)


def counting(rng: Random, split: Split) -> Sample:
    """Count the items of a list, count up or down, or count how often an item stands in a list."""
    kind = rng.randrange(3)
    if kind == 0:
        items = draw(
            rng,
            split,
            lambda r: [r.choice(words.NOUNS) for _ in range(r.randint(1, 10))],
            lambda content: f"count:{content}",
        )
        question = rng.choice(
            ("How many words are in this list: {}?", "Count the items: {}", "How many items: {}?")
        ).format(", ".join(items))
        noun = "item" if len(items) == 1 else "items"
        return ask("counting", question, f"There are {len(items)} {noun}.")
    if kind == 1:
        start, stop = draw(
            rng,
            split,
            lambda r: (
                r.randint(0, 90),
                r.randint(1, r.choice((9, 20, 99))) * r.choice((1, 1, -1)),
            ),
            lambda content: f"count:{content}",
        )
        if rng.random() < 0.4:
            start = 1
        stop = max(0, start + stop)
        step = 1 if stop >= start else -1
        numbers = ", ".join(str(n) for n in range(start, stop + step, step))
        return ask("counting", loosen(rng, f"Count from {start} to {stop}."), numbers)
    kinds = rng.sample(words.FRUITS, 2)
    items = draw(
        rng,
        split,
        lambda r: [r.choice(kinds) for _ in range(r.randint(2, 8))],
        lambda content: f"count:{content}",
    )
    wanted = kinds[0]
    question = f"How often does {wanted} occur in this list: {', '.join(items)}?"
    return ask("counting", question, f"{wanted} occurs {items.count(wanted)} times.")


RECITALS = (
    (("Say the alphabet.", "Recite the alphabet.", "Write the alphabet."), " ".join(words.LETTERS)),
    (("Name the days of the week.", "List the days of the week."), ", ".join(words.WEEKDAYS)),
    (("Name the months.", "List the months of the year."), ", ".join(words.MONTHS)),
    (("Name the planets.", "List the planets."), ", ".join(tables.PLANETS)),
)


def reciting(rng: Random, split: Split) -> Sample:
    """Long answers without surprises: fixed rows, a word many times, a times table."""
    if rng.random() < 0.3 and split == "train":
        questions, answer = rng.choice(RECITALS)
        return ask("reciting", loosen(rng, rng.choice(questions)), answer)
    if rng.random() < 0.4:
        number, last = draw(
            rng,
            split,
            lambda r: (r.randint(1, 12), r.randint(5, 12)),
            lambda content: f"table:{content}",
        )
        lines = "\n".join(f"{number} * {at} = {number * at}" for at in range(1, last + 1))
        return ask("reciting", f"Write the times table of {number} up to {last}.", lines)
    word, times = draw(
        rng,
        split,
        lambda r: (r.choice(words.ALL_WORDS), r.randint(2, 30)),
        lambda content: f"again:{content}",
    )
    question = rng.choice(("Write the word {} {} times.", "Repeat the word {} {} times."))
    return ask(
        "reciting",
        question.format(word, times),
        " ".join(f"{at}. {word}" for at in range(1, times + 1)),
    )


def common_letters(rng: Random, split: Split) -> Sample:
    """The first or last letter of some words."""
    items = draw(
        rng,
        split,
        lambda r: r.sample(words.ALL_WORDS, r.randint(1, 4)),
        lambda content: f"letters:{content}",
    )
    end, at = rng.choice((("first", 0), ("last", -1)))
    if len(items) == 1:
        return ask("letters", f"What is the {end} letter of {items[0]}?", items[0][at])
    question = f"Write the {end} letters of {english_list(items)}."
    return ask("letters", question, " ".join(item[at] for item in items))


TASKS = (
    Task("copying", 5, copying),
    Task("plain_copy", 1, plain_copy),
    Task("reversing", 2.5, reversing),
    Task("spelling", 3, spelling),
    Task("reciting", 1, reciting),
    Task("counting", 2, counting),
    Task("letters", 1, common_letters),
)
