"""The curriculum of ernie-tiny: what it learns, drawn by a program from a seed.

`sample` draws training conversations over all tasks, `held_out` draws the questions of one task
that no training run has seen.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from . import (
    arithmetic, calendars, calling, chatter, facts, lists, memory, strings, structured, thinking,
    writing,
)
from .base import Message, Sample, Split, Task, assistant, split_of, system_prompt, user

__all__ = ["JUDGED", "TASKS", "Message", "Sample", "Split", "Task", "held_out", "sample", "split_of"]

TASKS: dict[str, Task] = {
    task.name: task
    for module in (
        chatter, facts, arithmetic, strings, lists, structured, calling, memory, calendars, writing,
        thinking,
    )
    for task in module.TASKS
}

JUDGED = ("arithmetic", "copying", "sorting", "extraction", "recall", "facts")
"""The tasks that quantization, speculation and caching are judged on."""

SYSTEM_SHARE = 0.35
SELF_THINKING_SHARE = 0.25
ANY_THINKING_SHARE = 0.03


def _with_system(rng: Random, drawn: Sample) -> Sample:
    """Put a system prompt before the conversation."""
    return replace(drawn, messages=[{"role": "system", "content": system_prompt(rng)}, *drawn.messages])


def _with_thinking(drawn: Sample) -> Sample:
    """Make a direct answer one after a short thought, so that thinking works for every task."""
    *before, answer = drawn.messages
    thought = "This is a simple request. I can answer it directly."
    return replace(drawn, messages=[*before, assistant(answer["content"], thought)], thinking=True)


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
    plain = not drawn.thinking and not drawn.tools and len(drawn.messages) == 2
    if plain and rng.random() < ANY_THINKING_SHARE:
        drawn = _with_thinking(drawn)
    if drawn.thinking and rng.random() < SELF_THINKING_SHARE:
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
        drawn.append(_with_system(rng, one) if one.messages and rng.random() < SYSTEM_SHARE else one)
    return drawn
