"""Sorting lists, picking from them and editing them."""

from __future__ import annotations

from random import Random

from . import words
from .base import Sample, Split, Task, ask, draw


def number_list(rng: Random) -> list[int]:
    """Three to eight numbers, mostly of two digits."""
    top = rng.choice((9, 99, 99, 99, 999))
    return [rng.randint(0, top) for _ in range(rng.randint(3, 8))]


def word_list(rng: Random) -> list[str]:
    """Three to six different words with the same kind of meaning."""
    pool = rng.choice((words.ANIMALS, words.FRUITS, words.THINGS, words.COLOURS, words.JOBS))
    return rng.sample(pool, rng.randint(3, 6))


def sorting(rng: Random, split: Split) -> Sample:
    """Numbers upwards or downwards, words by the alphabet."""
    orders: tuple[str, ...]
    if rng.random() < 0.7:
        numbers = draw(rng, split, number_list, lambda content: f"sort:{content}")
        text = ", ".join(map(str, numbers))
        upwards = rng.random() < 0.6
        result = ", ".join(map(str, sorted(numbers, reverse=not upwards)))
        if upwards:
            orders = (
                "Sort these numbers: {}",
                "Sort ascending: {}",
                "Put these numbers in order: {}",
                "Sort the numbers from smallest to largest: {}",
                "Sort: {}",
                "请从小到大排序：{}",
            )
        else:
            orders = (
                "Sort descending: {}",
                "Sort the numbers from largest to smallest: {}",
                "Put these numbers in descending order: {}",
                "请从大到小排序：{}",
            )
        return ask("sorting", rng.choice(orders).format(text), result)
    items = draw(rng, split, word_list, lambda content: f"sort:{content}")
    orders = (
        "Sort these words: {}",
        "Sort alphabetically: {}",
        "Put these words in alphabetical order: {}",
        "Sort the words by the alphabet: {}",
    )
    return ask("sorting", rng.choice(orders).format(", ".join(items)), ", ".join(sorted(items)))


def editing(rng: Random, split: Split) -> Sample:
    """Add, remove, replace, swap or join the items of a list."""
    items = draw(
        rng,
        split,
        lambda r: r.sample(words.ALL_WORDS, r.randint(3, 8)),
        lambda content: f"edit:{content}",
    )
    text = ", ".join(items)
    new = rng.choice([word for word in words.NOUNS if word not in items])
    at = rng.randrange(len(items))
    old = items[at]
    operations = (
        (f"Remove {old} from this list: {text}", [item for item in items if item != old]),
        (f"Delete the word {old}: {text}", [item for item in items if item != old]),
        (f"Add {new} to the end of this list: {text}", [*items, new]),
        (f"Append {new} to this list: {text}", [*items, new]),
        (f"Put {new} at the start of this list: {text}", [new, *items]),
        (f"Replace {old} with {new} in this list: {text}", [*items[:at], new, *items[at + 1 :]]),
        (f"Remove the first item: {text}", items[1:]),
        (f"Remove the last item: {text}", items[:-1]),
        (f"Swap the first and the last item: {text}", [items[-1], *items[1:-1], items[0]]),
    )
    question, result = rng.choice(operations)
    return ask("list_editing", question, ", ".join(result))


def picking(rng: Random, split: Split) -> Sample:
    """The first, last, n-th, largest or smallest item, or what follows an item."""
    kind = rng.randrange(3)
    if kind == 0:
        numbers = draw(rng, split, number_list, lambda content: f"pick:{content}")
        text = ", ".join(map(str, numbers))
        name, value = rng.choice((("largest", max(numbers)), ("smallest", min(numbers))))
        question = rng.choice(("What is the {} number: {}?", "Find the {} number in this list: {}"))
        return ask("list_picking", question.format(name, text), str(value))
    items = draw(
        rng,
        split,
        lambda r: r.sample(words.ALL_WORDS, r.randint(3, 8)),
        lambda content: f"pick:{content}",
    )
    text = ", ".join(items)
    if kind == 1:
        names = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
        at = rng.randrange(len(items))
        if at == len(items) - 1 and rng.random() < 0.6:
            return ask("list_picking", f"What is the last item of this list: {text}?", items[-1])
        return ask("list_picking", f"What is the {names[at]} item of this list: {text}?", items[at])
    at = rng.randrange(len(items) - 1)
    return ask(
        "list_picking", f"Which word comes after {items[at]} in this list: {text}?", items[at + 1]
    )


def joining(rng: Random, split: Split) -> Sample:
    """Write a list with other separators, or in upper or lower case."""
    items = draw(
        rng,
        split,
        lambda r: r.sample(words.NOUNS, r.randint(2, 6)),
        lambda content: f"join:{content}",
    )
    kind = rng.randrange(4)
    if kind == 0:
        return ask("list_joining", f"Join with dashes: {', '.join(items)}", "-".join(items))
    if kind == 1:
        return ask(
            "list_joining", f"Split this text into a list: {'-'.join(items)}", ", ".join(items)
        )
    if kind == 2:
        numbered = "\n".join(f"{at}. {item}" for at, item in enumerate(items, 1))
        return ask("list_joining", f"Make a numbered list: {', '.join(items)}", numbered)
    capitals = ", ".join(item.capitalize() for item in items)
    return ask("list_joining", f"Capitalize these words: {', '.join(items)}", capitals)


TASKS = (
    Task("sorting", 8, sorting),
    Task("list_editing", 2, editing),
    Task("list_picking", 2, picking),
    Task("list_joining", 1.5, joining),
)
