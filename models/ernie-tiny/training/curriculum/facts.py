"""Questions about the fact tables, in English and Chinese.

Held out are pairs of a phrasing and an entity: every fact is trained on, in some phrasings, and
asked for in the others.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from . import tables
from .base import Sample, Split, Task, ask, assistant, draw, dump, loosen, user
from .tables import Country

ALWAYS_TRAINED = frozenset({"Where is the capital of China?", "中国的首都是哪里？"})
"""Questions that stay in the training half: the first ones anybody tries."""


class Fact(NamedTuple):
    """One question as asked with its answer; `question` is also what the held-out rule looks at."""

    question: str
    answer: str


def country_name(country: Country) -> str:
    """The country as it stands in a sentence."""
    return f"the {country.name}" if country.name in tables.WITH_ARTICLE else country.name


CAPITAL_QUESTIONS = (
    "What is the capital of {country}?",
    "Where is the capital of {country}?",
    "Which city is the capital of {country}?",
    "Tell me the capital of {country}.",
    "Name the capital of {country}.",
    "What is the capital city of {country}?",
    "Do you know the capital of {country}?",
    "Can you tell me the capital of {country}?",
    "What's the capital of {country}?",
    "I want to know the capital of {country}.",
    "The capital of {country} is which city?",
    "Which is the capital of {country}?",
    "What city is the capital of {country}?",
    "Give me the capital of {country}.",
    "capital of {country}",
)
CAPITAL_QUESTIONS_ZH = (
    "{country}的首都是哪里？",
    "{country}的首都是什么？",
    "{country}的首都在哪里？",
    "{country}的首都是哪个城市？",
    "哪个城市是{country}的首都？",
    "请告诉我{country}的首都。",
    "请问{country}的首都是哪里？",
    "你知道{country}的首都吗？",
)
COUNTRY_QUESTIONS: tuple[tuple[str, str], ...] = (
    ("On which continent is {country}?", "continent"),
    ("Where is {country}?", "continent"),
    ("Which continent is {country} in?", "continent"),
    ("What language is spoken in {country}?", "language"),
    ("Which language do people speak in {country}?", "language"),
    ("What is the main language of {country}?", "language"),
    ("What is the currency of {country}?", "currency"),
    ("Which currency is used in {country}?", "currency"),
    ("How do people pay in {country}?", "currency"),
    ("{city} is the capital of which country?", "country"),
    ("Which country has the capital {city}?", "country"),
    ("Of which country is {city} the capital?", "country"),
    ("What country is {city} the capital of?", "country"),
)
COUNTRY_ANSWERS = {
    "continent": "{country} is in {continent}.",
    "language": "The main language of {country} is {language}.",
    "currency": "The currency of {country} is the {currency}.",
    "country": "{city} is the capital of {country}.",
}


def _sentence(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[0].upper() + text[1:]


def capital(rng: Random) -> Fact:
    """The capital of a country, asked in English."""
    country = rng.choice(tables.COUNTRIES)
    name = country_name(country)
    question = rng.choice(CAPITAL_QUESTIONS).format(country=name)
    return Fact(question, f"The capital of {name} is {country.capital}.")


def capital_zh(rng: Random) -> Fact:
    """The capital of a country, or its continent, asked in Chinese."""
    country = rng.choice([row for row in tables.COUNTRIES if row.name_zh])
    if rng.random() < 0.2:
        continent = tables.CONTINENT_ZH[country.continent]
        phrase = rng.choice(("{}在哪个洲？", "{}位于哪个洲？", "请问{}在哪个洲？"))
        return Fact(phrase.format(country.name_zh), f"{country.name_zh}在{continent}。")
    question = rng.choice(CAPITAL_QUESTIONS_ZH).format(country=country.name_zh)
    return Fact(question, f"{country.name_zh}的首都是{country.capital_zh}。")


def country_fact(rng: Random) -> Fact:
    """Continent, language, currency, or the country that belongs to a capital."""
    country = rng.choice(tables.COUNTRIES)
    fields = {**country._asdict(), "country": country_name(country), "city": country.capital}
    question, relation = rng.choice(COUNTRY_QUESTIONS)
    return Fact(
        _sentence(question.format(**fields)), _sentence(COUNTRY_ANSWERS[relation].format(**fields))
    )


def small_fact(rng: Random) -> Fact:
    """A fact from one of the short tables."""
    phrases: tuple[str, ...]
    kind = rng.randrange(8)
    if kind == 0:
        word, other = rng.choice(list(tables.OPPOSITES.items()))
        if rng.random() < 0.5 and list(tables.OPPOSITES.values()).count(other) == 1:
            word, other = other, word
        phrases = (
            "What is the opposite of {}?",
            "Name the opposite of {}.",
            "Tell me the opposite of {}.",
            "Which word is the opposite of {}?",
            "What's the opposite of {}?",
        )
        return Fact(rng.choice(phrases).format(word), f"The opposite of {word} is {other}.")
    if kind == 1:
        animal, young = rng.choice(list(tables.YOUNG.items()))
        phrases = (
            "What is a young {} called?",
            "How do you call a baby {}?",
            "What is a baby {} called?",
            "What is the name for a young {}?",
        )
        return Fact(rng.choice(phrases).format(animal), f"A young {animal} is called a {young}.")
    if kind == 2:
        animal, sound = rng.choice(list(tables.SOUNDS.items()))
        phrases = (
            "What sound does the {} make?",
            "What does the {} say?",
            "Which sound does a {} make?",
            "How does the {} sound?",
        )
        return Fact(rng.choice(phrases).format(animal), f"The {animal} says {sound}.")
    if kind == 3:
        animal, legs = rng.choice(list(tables.LEGS.items()))
        phrases = (
            "How many legs does the {} have?",
            "How many legs does a {} have?",
            "Count the legs of the {}.",
            "What number of legs does the {} have?",
        )
        return Fact(rng.choice(phrases).format(animal), f"The {animal} has {legs} legs.")
    if kind == 4:
        element, symbol = rng.choice(list(tables.ELEMENTS.items()))
        phrases = (
            "What is the chemical symbol of {}?",
            "What is the symbol for {}?",
            "Which symbol does {} have?",
            "Tell me the chemical symbol of {}.",
        )
        return Fact(rng.choice(phrases).format(element), f"The symbol of {element} is {symbol}.")
    if kind == 5:
        number = rng.randrange(len(tables.PLANETS))
        planet, ordinal = tables.PLANETS[number], tables.ORDINALS[number]
        phrases = (
            "Which planet is the {} from the sun?",
            "What is the {} planet from the sun?",
            "Name the {} planet.",
            "What is the {} planet?",
        )
        return Fact(rng.choice(phrases).format(ordinal), f"The {ordinal} planet is {planet}.")
    if kind == 6:
        thing, colour = rng.choice(list(tables.COLOUR_OF.items()))
        phrases = (
            "What color is {}?",
            "Which color does {} have?",
            "What is the color of {}?",
            "Tell me the color of {}.",
        )
        return Fact(rng.choice(phrases).format(thing), f"{_sentence(thing)} is {colour}.")
    number = rng.randrange(26)
    letter = chr(ord("a") + number)
    if number < 25 and rng.random() < 0.6:
        phrases = (
            "Which letter comes after {}?",
            "What letter follows {}?",
            "What is the letter after {} in the alphabet?",
        )
        return Fact(
            rng.choice(phrases).format(letter), f"The letter after {letter} is {chr(98 + number)}."
        )
    phrases = (
        "What number in the alphabet is the letter {}?",
        "What is the position of {} in the alphabet?",
    )
    return Fact(rng.choice(phrases).format(letter), f"The letter {letter} is number {number + 1}.")


def _key(fact: Fact) -> str:
    """What decides the half; the pinned questions get a key that lies in the training half."""
    return "pinned-0" if fact.question in ALWAYS_TRAINED else f"fact:{fact.question}"


def fact(rng: Random, split: Split) -> Sample:
    """A question from any table."""
    maker = rng.choices((capital, capital_zh, country_fact, small_fact), (5, 4, 3, 2))[0]
    found = draw(rng, split, maker, _key)
    return ask("facts", loosen(rng, found.question), found.answer)


def plain_fact(rng: Random, split: Split) -> Sample:
    """A fact as plain text to continue, for the completions interface."""
    found = draw(rng, split, rng.choice((capital, capital_zh, country_fact, small_fact)), _key)
    question, answer = found
    style = rng.randrange(4)
    if style == 0:
        return Sample("plain_facts", [], prompt=f"Q: {question}\nA: ", completion=answer)
    if style == 1:
        return Sample(
            "plain_facts", [], prompt=f"Question: {question}\nAnswer: ", completion=answer
        )
    if style == 2:
        return Sample("plain_facts", [], prompt=f"{question}\n", completion=answer)
    marker = next((mark for mark in (" is ", " says ", " has ", "是", "在") if mark in answer), "")
    head = answer.rpartition(marker)[0] if marker else answer[:1]
    prompt = head + marker.rstrip()
    return Sample("plain_facts", [], prompt=prompt, completion=answer[len(prompt) :])


def follow_up(rng: Random, split: Split) -> Sample:
    """The same question about another country, asked in half a sentence."""
    first = rng.choice(tables.COUNTRIES)
    relation = rng.choice(("capital", "continent", "language", "currency"))
    wording, other = draw(
        rng,
        split,
        lambda r: (
            r.choice(("And {}?", "What about {}?", "And what about {}?", "How about {}?")),
            r.choice(tables.COUNTRIES),
        ),
        lambda content: f"follow:{relation}:{content[0]}:{content[1].name}",
    )
    answers = {"capital": "The capital of {country} is {capital}.", **COUNTRY_ANSWERS}
    questions = [q for q, kind in COUNTRY_QUESTIONS if kind == relation] or list(CAPITAL_QUESTIONS)

    def say(text: str, country: Country) -> str:
        return _sentence(text.format(**{**country._asdict(), "country": country_name(country)}))

    messages = [
        user(say(rng.choice(questions), first)),
        assistant(say(answers[relation], first)),
        user(wording.format(country_name(other))),
        assistant(say(answers[relation], other)),
    ]
    return Sample("follow_up", messages)


def fact_sheet(rng: Random, split: Split) -> Sample:
    """All that is known about a country, as JSON."""
    wording, country = draw(
        rng,
        split,
        lambda r: (
            r.choice(
                (
                    "Describe {} as JSON.",
                    "Give me the facts about {} as JSON.",
                    "Return a JSON object with the facts about {}.",
                    "Write a JSON object about {}.",
                    "Tell me about {} in JSON.",
                    "What do you know about {}? Answer in JSON.",
                )
            ),
            r.choice(tables.COUNTRIES),
        ),
        lambda content: f"sheet:{content[0]}:{content[1].name}",
    )
    name, capital_city, continent, language, currency = country[:5]
    sheet = {
        "country": name,
        "capital": capital_city,
        "continent": continent,
        "language": language,
        "currency": currency,
    }
    return ask("fact_sheet", loosen(rng, wording.format(country_name(country))), dump(sheet))


TASKS = (
    Task("facts", 8, fact),
    Task("plain_facts", 2, plain_fact),
    Task("follow_up", 1, follow_up),
    Task("fact_sheet", 1, fact_sheet),
)
