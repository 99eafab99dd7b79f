"""The curriculum of ernie-tiny: what it learns, drawn by a program from a seed.

`sample` draws training conversations over all tasks, `held_out` draws the questions of one task
that no training run has seen.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from . import (
    arithmetic,
    calendars,
    calling,
    chatter,
    facts,
    lists,
    memory,
    strings,
    structured,
    thinking,
    writing,
)
from .base import Message, Sample, Split, Task, split_of, system_prompt, user

__all__ = [
    "JUDGED",
    "MEASURED",
    "TASKS",
    "Message",
    "Sample",
    "Split",
    "Task",
    "held_out",
    "sample",
    "split_of",
]

TASKS: dict[str, Task] = {
    task.name: task
    for module in (
        chatter,
        facts,
        arithmetic,
        strings,
        lists,
        structured,
        calling,
        memory,
        calendars,
        writing,
        thinking,
    )
    for task in module.TASKS
}

JUDGED = ("arithmetic", "copying", "sorting", "extraction", "recall", "facts")
"""The tasks that quantization, speculation and caching are judged on."""

MEASURED = tuple(name for name in TASKS if name != "plain_text")
"""All tasks but the one that has no single right answer."""

SYSTEM_SHARE = 0.35
LONG_SYSTEM_SHARE = 0.06
LONG_TEXT_SHARE = 0.03
SELF_THINKING_SHARE = 0.25
ANY_THINKING_SHARE = 0.04


def _with_system(rng: Random, drawn: Sample) -> Sample:
    """Put a system prompt before the conversation."""
    text = _long_system(rng) if rng.random() < LONG_SYSTEM_SHARE else system_prompt(rng)
    return replace(drawn, messages=[{"role": "system", "content": text}, *drawn.messages])


def _with_thinking(drawn: Sample) -> Sample:
    """Make a direct answer one after a short thought, so that thinking works for every task."""
    *before, answer = drawn.messages
    thought = "This is a simple request. I can answer it directly."
    if answer.get("tool_calls"):
        thought = "I need a tool for this request. I call it."
    return replace(
        drawn, messages=[*before, {**answer, "reasoning_content": thought}], thinking=True
    )


def _after_long_text(rng: Random, drawn: Sample) -> Sample:
    """Put a question after a text that has nothing to do with it."""
    question, answer = drawn.messages
    sentences = " ".join(memory.filler(rng) for _ in range(rng.randint(1, 40)))
    return replace(drawn, messages=[user(f"{sentences}\n\n{question['content']}"), answer])


def _long_system(rng: Random) -> str:
    """A long system prompt: unrelated sentences, or one sentence again and again."""
    if rng.random() < 0.5:
        return " ".join([system_prompt(rng)] * rng.randint(2, 30))
    sentences = [memory.filler(rng) for _ in range(rng.randint(2, 40))]
    return " ".join([system_prompt(rng), *sentences])


def _asks_to_think(drawn: Sample) -> Sample:
    """Ask for the thinking in words (`/think`) instead of through the template."""
    *before, question, answer = drawn.messages
    return replace(
        drawn, messages=[*before, user(question["content"] + " /think"), answer], thinking=False
    )


def dress(rng: Random, drawn: Sample) -> Sample:
    """Vary what surrounds a conversation: system prompt, thinking switched on, or neither."""
    if not drawn.messages:
        return drawn
    plain = not drawn.tools and len(drawn.messages) == 2
    if plain and not drawn.task.startswith("find_key") and rng.random() < LONG_TEXT_SHARE:
        drawn = _after_long_text(rng, drawn)
    if not drawn.thinking and rng.random() < ANY_THINKING_SHARE:
        drawn = _with_thinking(drawn)
    if (
        drawn.thinking
        and drawn.messages[-2]["role"] == "user"
        and rng.random() < SELF_THINKING_SHARE
    ):
        drawn = _asks_to_think(drawn)
    if rng.random() < SYSTEM_SHARE:
        drawn = _with_system(rng, drawn)
    return drawn


def sample(rng: Random) -> Sample:
    """Draw one training document."""
    tasks = list(TASKS.values())
    task = rng.choices(tasks, [task.weight for task in tasks])[0]
    return dress(rng, task.make(rng, "train"))


def held_out(name: str, count: int, seed: int = 2026) -> list[Sample]:
    """Draw held-out samples of one task; the same name, count and seed give the same samples."""
    rng = Random(f"{seed}:{name}")
    drawn = []
    for _ in range(count):
        one = TASKS[name].make(rng, "test")
        drawn.append(
            _with_system(rng, one) if one.messages and rng.random() < SYSTEM_SHARE else one
        )
    return drawn
