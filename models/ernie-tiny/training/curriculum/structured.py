"""JSON: editing an object, reading a value, and extracting data into a given schema."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from . import words
from .base import Sample, Split, Task, ask, draw, dump

KEYS = words.split_words(
    "name age city color size price count level title owner status team score year month day "
    "weight height speed kind place job pet code group rank unit note tag type"
)


def value(rng: Random) -> Any:
    """A plain JSON value."""
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(words.NOUNS + words.COLOURS + words.FIRST_NAMES)
    if kind < 0.85:
        return rng.randint(0, 999)
    if kind < 0.95:
        return rng.random() < 0.5
    return [rng.randint(0, 99) for _ in range(rng.randint(1, 4))]


def json_object(rng: Random) -> dict[str, Any]:
    """A flat object of two to six keys."""
    return {name: value(rng) for name in rng.sample(KEYS, rng.randint(2, 6))}


def json_editing(rng: Random, split: Split) -> Sample:
    """Change, add, remove, rename or read one key of an object."""
    data = draw(rng, split, json_object, lambda content: f"json:{dump(content)}")
    text = dump(data)
    old = rng.choice(list(data))
    new = rng.choice([name for name in KEYS if name not in data])
    fresh = value(rng)
    kind = rng.randrange(7)
    if kind == 0:
        return ask(
            "json_editing",
            f"Set {old} to {dump(fresh)} in this JSON: {text}",
            dump({**data, old: fresh}),
        )
    if kind == 1:
        return ask(
            "json_editing",
            f"Add the key {new} with the value {dump(fresh)}: {text}",
            dump({**data, new: fresh}),
        )
    if kind == 2:
        rest = {name: item for name, item in data.items() if name != old}
        return ask("json_editing", f"Remove the key {old} from this JSON: {text}", dump(rest))
    if kind == 3:
        renamed = {new if name == old else name: item for name, item in data.items()}
        return ask("json_editing", f"Rename the key {old} to {new}: {text}", dump(renamed))
    if kind == 4:
        return ask(
            "json_editing", f"What is the value of {old} in this JSON: {text}", dump(data[old])
        )
    if kind == 5:
        return ask("json_editing", f"List the keys of this JSON: {text}", ", ".join(data))
    lines = "\n".join(
        f"{name}: {item}" for name, item in data.items() if isinstance(item, str | int)
    )
    flat = {name: item for name, item in data.items() if isinstance(item, str | int)}
    return ask("json_editing", f"Write this as JSON:\n{lines}", dump(flat))


Field = tuple[str, str, Callable[[Random], Any], str]
"""A field: its key, its JSON type, how to draw a value, and how a sentence says it."""


def _email(rng: Random) -> str:
    """An address at an example domain."""
    name = rng.choice(words.FIRST_NAMES).lower()
    return f"{name}{rng.randint(1, 99)}@example.{rng.choice(('com', 'org', 'net'))}"


def _phone(rng: Random) -> str:
    """A made-up phone number."""
    return f"555-{rng.randint(0, 9999):04d}"


def _date(rng: Random) -> str:
    """A day written year first."""
    return f"{rng.randint(1990, 2035)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


PERSON_FIELDS: tuple[Field, ...] = (
    ("age", "integer", lambda rng: rng.randint(18, 90), "is {} years old"),
    ("city", "string", lambda rng: rng.choice(words.CITIES), "lives in {}"),
    ("job", "string", lambda rng: rng.choice(words.JOBS), "works as a {}"),
    ("email", "string", _email, "can be reached at {}"),
    ("phone", "string", _phone, "has the phone number {}"),
    ("hobby", "string", lambda rng: rng.choice(words.HOBBIES), "likes {}"),
    ("birthday", "string", _date, "was born on {}"),
)
ORDER_FIELDS: tuple[Field, ...] = (
    ("quantity", "integer", lambda rng: rng.randint(2, 99), "for {} pieces"),
    ("price", "number", lambda rng: rng.randint(100, 9999) / 100, "at {} dollars"),
    ("city", "string", lambda rng: rng.choice(words.CITIES), "to {}"),
    ("date", "string", _date, "on {}"),
    ("color", "string", lambda rng: rng.choice(words.COLOURS), "in {}"),
)


def _record(rng: Random) -> tuple[str, list[tuple[str, str, Any]]]:
    """A sentence and the fields it holds: key, type, value, in the order of the sentence."""
    if rng.random() < 0.65:
        name = words.person(rng)
        fields = rng.sample(PERSON_FIELDS, rng.randint(1, 4))
        row: list[tuple[str, str, Any]] = [("name", "string", name)]
        clauses = []
        for key, kind, make, phrase in fields:
            item = make(rng)
            row.append((key, kind, item))
            clauses.append(phrase.format(item))
        joined = (
            clauses[0] if len(clauses) == 1 else ", ".join(clauses[:-1]) + " and " + clauses[-1]
        )
        return f"{name} {joined}.", row
    product = rng.choice(words.THINGS)
    fields = rng.sample(ORDER_FIELDS, rng.randint(1, 4))
    row = [("product", "string", product)]
    text = f"{rng.choice(('Order', 'An order', 'We sent an order'))} of the {product}"
    for key, kind, make, phrase in fields:
        item = make(rng)
        row.append((key, kind, item))
        text += " " + phrase.format(item)
    return text + ".", row


def schema_of(fields: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """The JSON schema of an object with these fields."""
    return {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind, _ in fields},
        "required": [key for key, _, _ in fields],
    }


def extraction(rng: Random, split: Split) -> Sample:
    """Pull the data out of a sentence, into the keys a schema or a list names, in its order."""
    text, row = draw(rng, split, _record, lambda content: f"extract:{content[0]}")
    wanted = rng.sample(row, rng.randint(1, len(row))) if rng.random() < 0.6 else row
    answer = dump({key: item for key, _, item in wanted})
    if rng.random() < 0.3:
        filler = (
            f"{rng.choice(words.PLACES).capitalize()} news: the {rng.choice(words.ADJECTIVES)} day."
        )
        text = f"{filler} {text}" if rng.random() < 0.5 else f"{text} {filler}"
    schema = dump(schema_of(wanted))
    keys = ", ".join(key for key, _, _ in wanted)
    forms = (
        f"Extract the data as JSON with this schema: {schema}\nText: {text}",
        f"Text: {text}\nExtract the data into this JSON schema: {schema}",
        f"{text}\n\nReturn a JSON object that follows this schema: {schema}",
        f"Extract {keys} as JSON from this text: {text}",
        f"Return JSON with the keys {keys}.\nText: {text}",
    )
    return ask("extraction", rng.choice(forms), answer)


def free_json(rng: Random, split: Split) -> Sample:
    """A JSON object for a fact that the user states in words."""
    name, age, city = draw(
        rng,
        split,
        lambda r: (words.person(r), r.randint(18, 90), r.choice(words.CITIES)),
        lambda content: f"free:{content}",
    )
    question = rng.choice(
        (
            "Make a JSON object for {name}, age {age}, from {city}.",
            "Write JSON with name {name}, age {age} and city {city}.",
        )
    ).format(name=name, age=age, city=city)
    return ask("json_writing", question, dump({"name": name, "age": age, "city": city}))


TASKS = (
    Task("json_editing", 3, json_editing),
    Task("extraction", 7, extraction),
    Task("json_writing", 1, free_json),
)
