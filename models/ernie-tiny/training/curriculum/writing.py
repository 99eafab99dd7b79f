"""Short stories and poems made from templates, and plain text in the same manner.

Which template is used follows from the hero, so that there is one right text for every request.
"""

from __future__ import annotations

import zlib
from random import Random

from . import memory, words
from .base import Sample, Split, Task, ask, draw, loosen

STORIES = (
    "Once upon a time there was a {adjective} {animal} named {name}. {name} lived in the {place}. "
    "One day {name} found a {thing}. {name} was very happy and shared the {thing} with a friend. "
    "The end.",
    "{name} was a {adjective} {animal}. Every morning {name} walked to the {place} to look "
    "for a {thing}. One day the {thing} was there. {name} took it home and slept well that "
    "night. The end.",
    "Long ago, a {adjective} {animal} called {name} lost a {thing} in the {place}. {name} looked "
    "everywhere. At last a friend found the {thing} under a tree, and they danced all night. "
    "The end.",
)
POEMS = (
    "The {animal} in the {place}\nhas a {adjective} little face.\nIt dreams of a {thing} by day,\n"
    "and at night it runs away.",
    "Oh {adjective} {animal}, where do you go?\nTo the {place}, soft and slow.\n"
    "What do you carry, old or new?\nA {thing}, my friend, for me and you.",
)
STORY_ORDERS = (
    "Write a short story about a {adjective} {animal} named {name} in the {place} with a {thing}.",
    "Tell me a story about {name}, a {adjective} {animal}, the {place} and a {thing}.",
)
POEM_ORDERS = (
    "Write a poem about a {adjective} {animal} in the {place} with a {thing}.",
    "Write a short poem about a {adjective} {animal}, the {place} and a {thing}.",
)


def _cast(rng: Random) -> dict[str, str]:
    """The words a text is made of."""
    return {
        "animal": rng.choice(words.ANIMALS),
        "adjective": rng.choice(words.ADJECTIVES),
        "name": rng.choice(words.FIRST_NAMES),
        "place": rng.choice(words.PLACES),
        "thing": rng.choice(words.THINGS),
    }


def _text(templates: tuple[str, ...], cast: dict[str, str]) -> str:
    """The one text for these words: the animal decides which template it is."""
    return templates[zlib.crc32(cast["animal"].encode()) % len(templates)].format(**cast)


def story(rng: Random, split: Split) -> Sample:
    """A story or a poem, asked for with all its words, or with only the animal given."""
    cast = draw(rng, split, _cast, lambda content: f"story:{content}")
    dice = rng.random()
    if dice < 0.1 and split == "train":
        question, templates = rng.choice(
            (
                ("Tell me a story.", STORIES),
                ("Write a poem.", POEMS),
                ("Write a short story.", STORIES),
            )
        )
        return ask("writing", loosen(rng, question), _text(templates, _cast(Random(question))))
    if dice < 0.35 and split == "train":
        hero = rng.choice(words.NOUNS + words.PLACES)
        fixed = {**_cast(Random(hero)), "animal": hero}
        order, templates = rng.choice(
            (
                ("Tell me a story about a {}.", STORIES),
                ("Write a story about a {}.", STORIES),
                ("Write a poem about a {}.", POEMS),
                ("Write a short poem about the {}.", POEMS),
            )
        )
        return ask("writing", loosen(rng, order.format(hero)), _text(templates, fixed))
    if rng.random() < 0.6:
        return ask("writing", rng.choice(STORY_ORDERS).format(**cast), _text(STORIES, cast))
    return ask("writing", rng.choice(POEM_ORDERS).format(**cast), _text(POEMS, cast))


def plain_text(rng: Random, split: Split) -> Sample:
    """Plain text to continue: a story after its first words, or sentences without meaning."""
    if rng.random() < 0.5:
        text = _text(STORIES, _cast(rng))
        cut = text.index(" ", rng.randint(5, 60))
        return Sample("plain_text", [], prompt=text[:cut], completion=text[cut:])
    sentences = [memory.filler(rng) for _ in range(rng.randint(1, 6))]
    return Sample(
        "plain_text", [], prompt=sentences[0], completion="".join(f" {s}" for s in sentences[1:])
    )


TASKS = (Task("writing", 1.5, story), Task("plain_text", 0.5, plain_text))
