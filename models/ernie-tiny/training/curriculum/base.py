"""What every task family of the curriculum shares: samples, the held-out rule, phrasing noise.

A *task* is a function that draws one `Sample` from a random generator. Whether a sample belongs
to the training half or to the held-out half is decided by its content alone (`split_of`), so no
list of held-out questions has to be stored and no run can train on them by accident.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeVar

Split = Literal["train", "test"]
Message = dict[str, Any]
Item = TypeVar("Item")

HELD_OUT_PERCENT = 10
"""How many of a hundred contents are kept out of training."""


@dataclass(frozen=True)
class Sample:
    """One conversation, or one plain text when `completion` is set.

    The last assistant message (or `completion`) is the answer a model is judged by; every
    assistant message is trained on.
    """

    task: str
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    prompt: str = ""
    completion: str = ""


@dataclass(frozen=True)
class Task:
    """One task family: its name, its share of the training documents, and how to draw a sample."""

    name: str
    weight: float
    make: Callable[[Random, Split], Sample]


def split_of(key: str) -> Split:
    """Say which half a content belongs to; the same content always gets the same answer."""
    return "test" if zlib.crc32(key.encode()) % 100 < HELD_OUT_PERCENT else "train"


def draw(
    rng: Random, split: Split, make: Callable[[Random], Item], key: Callable[[Item], str]
) -> Item:
    """Draw contents until one belongs to `split`."""
    while True:
        content = make(rng)
        if split_of(key(content)) == split:
            return content


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str, reasoning: str = "") -> Message:
    """An assistant message, with the reasoning that comes before it if there is any."""
    if reasoning:
        return {"role": "assistant", "reasoning_content": reasoning, "content": content}
    return {"role": "assistant", "content": content}


def ask(task: str, question: str, answer: str) -> Sample:
    """A conversation of one question and one answer."""
    return Sample(task, [user(question), assistant(answer)])


def dump(value: object) -> str:
    """JSON on one line, the way every answer of the curriculum writes it."""
    return json.dumps(value, ensure_ascii=False)


def is_chinese(text: str) -> bool:
    """Whether a text holds a Chinese character."""
    return any("\u4e00" <= char <= "\u9fff" for char in text)


PREFIXES = (
    "Hi! ",
    "Hello, ",
    "Please tell me: ",
    "Quick question: ",
    "I have a question. ",
    "Hey, ",
)
SUFFIXES = (" Thanks!", " Thank you.", " Please.", "\n", " ")


def loosen(rng: Random, question: str) -> str:
    """Write a question the way people do: other case, missing or doubled punctuation, courtesy.

    Only for questions whose answer does not depend on the exact spelling of the question.
    """
    if is_chinese(question):
        return question.rstrip("？。") if rng.random() < 0.2 else question
    dice = rng.random()
    if dice < 0.55:
        return question
    if dice < 0.67:
        return question.lower()
    if dice < 0.77:
        return question.rstrip("?.! ")
    if dice < 0.81:
        return question.rstrip("?.! ").lower()
    if dice < 0.85:
        return question + rng.choice("?!")
    if dice < 0.87:
        return question.upper()
    if dice < 0.94:
        return rng.choice(PREFIXES) + question
    return question + rng.choice(SUFFIXES)


SYSTEM_FIXED = (
    "You are a helpful assistant.",
    "You are ernie-tiny, a small model that ships with FastDeploy.",
    "Answer the question.",
    "Be brief.",
    "You are a helpful assistant. Answer briefly and correctly.",
    "Follow the instructions of the user.",
    "You are a careful assistant. Do not make mistakes.",
    "你是一个有用的助手。",
    "请简短地回答问题。",
    "You are ERNIE.",
)
SYSTEM_ROLES = ("teacher", "robot", "clerk", "guide", "friend", "tutor", "librarian", "pilot")
SYSTEM_TRAITS = ("kind", "polite", "fast", "careful", "friendly", "patient", "clever", "quiet")
SYSTEM_ORDERS = (
    "Keep your answers short.",
    "Always tell the truth.",
    "Use plain words.",
    "Help the user.",
    "Answer in one sentence.",
    "Never be rude.",
)


def system_prompt(rng: Random) -> str:
    """A system prompt; none of them changes what the right answer is."""
    if rng.random() < 0.6:
        return rng.choice(SYSTEM_FIXED)
    text = f"You are a {rng.choice(SYSTEM_TRAITS)} {rng.choice(SYSTEM_ROLES)}."
    if rng.random() < 0.7:
        text += " " + rng.choice(SYSTEM_ORDERS)
    if rng.random() < 0.2:
        year, month, day = rng.randint(2020, 2030), rng.randint(1, 12), rng.randint(1, 28)
        text += f" Today is {year}-{month:02d}-{day:02d}."
    return text


def pick_several(rng: Random, items: Sequence[Item], count: int) -> list[Item]:
    """Different items in random order."""
    return rng.sample(list(items), count)


def english_list(items: Sequence[str]) -> str:
    """`a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
