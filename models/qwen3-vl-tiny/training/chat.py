"""Conversations about pictures, and how they are written: the chat template once more, in Python,
in pieces that say which of them the model has to write itself."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from PIL import Image

from scenes import TASKS, Scene, Turn, ask, color_of, draw_content, draw_new_pair, paint

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SYSTEM = ("You are a helpful assistant.", "Answer questions about pictures.")
SCORED = (*TASKS, "two pictures", "new pairs")
KINDS = ("shapes", "shapes", "shapes", "text", "text", "both")
# Reading takes the most practice.
WEIGHTS = {"word": 4, "number": 4, "describe": 2, "relation": 2, "background": 0.5, "what at": 2}


@dataclass(frozen=True)
class Asked:
    """A user's message and its answer: so many new pictures, before or after the text."""

    pictures: int
    turn: Turn
    is_text_first: bool = False

    @property
    def message(self) -> str:
        shown = IMAGE * self.pictures
        return self.turn.question + shown if self.is_text_first else shown + self.turn.question


@dataclass(frozen=True)
class Conversation:
    """Scenes in the order in which they are shown, and the turns about them."""

    scenes: list[Scene]
    asked: list[Asked]
    system: str = ""


class Piece(NamedTuple):
    """A stretch of text; `target` when the model has to write it."""

    text: str
    target: bool


def pieces(conversation: Conversation) -> list[Piece]:
    """The text, cut where the writer changes."""
    system = conversation.system
    waiting = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    found = []
    for asked in conversation.asked:
        waiting += f"<|im_start|>user\n{asked.message}<|im_end|>\n<|im_start|>assistant\n"
        found += [Piece(waiting, False), Piece(f"{asked.turn.answer}<|im_end|>", True)]
        waiting = "\n"
    return found


def _questions(rng: Random, scene: Scene, count: int) -> list[Turn]:
    found: list[Turn] = []
    weights = [WEIGHTS.get(task, 1) for task in TASKS]
    while len(found) < count:
        turn = ask(rng, scene, rng.choices(TASKS, weights)[0])
        if turn is not None:
            found.append(turn)
    return found


def two_pictures(rng: Random, scenes: list[Scene]) -> Turn:
    """A question about one of two pictures, or about both."""
    counts = [len(scene.things) for scene in scenes]
    if rng.random() < 0.3 and counts[0] != counts[1]:
        more = "first" if counts[0] > counts[1] else "second"
        return Turn("two", "Which picture has more shapes?", f"The {more} picture.")
    which = rng.randrange(2)
    while (turn := ask(rng, scenes[which], rng.choice(TASKS))) is None or turn.task == "describe":
        pass
    word = ("first", "second")[which]
    body = turn.question.rstrip("?.")
    return Turn("two", f"In the {word} picture: {body}?", turn.answer)


def converse(rng: Random, *, held_out: bool = False) -> Conversation:
    """A conversation as one is trained on."""
    system = rng.choice(SYSTEM) if rng.random() < 0.15 else ""
    is_text_first = rng.random() < 0.2
    if rng.random() < 0.02:
        turns = _questions(rng, draw_content(rng, rng.choice(KINDS)), 1)
        turn = Turn("none", turns[0].question, "There is no picture.")
        return Conversation([], [Asked(0, turn)], system)
    scenes = [draw_content(rng, rng.choice(KINDS), held_out=held_out)]
    if rng.random() > 0.12:
        turns = _questions(rng, scenes[0], rng.randint(2, 4))
        asked = [Asked(n == 0, turn, is_text_first) for n, turn in enumerate(turns)]
        return Conversation(scenes, asked, system)
    scenes.append(draw_content(rng, rng.choice(KINDS), held_out=held_out))
    if rng.random() < 0.5:
        turns = [two_pictures(rng, scenes) for _ in range(rng.randint(2, 3))]
        asked = [Asked(2 * (n == 0), turn, is_text_first) for n, turn in enumerate(turns)]
    else:  # one after the other: questions are about the latest
        asked = [
            Asked(n == 0, turn, is_text_first)
            for scene in scenes
            for n, turn in enumerate(_questions(rng, scene, rng.randint(1, 2)))
        ]
    return Conversation(scenes, asked, system)


# -- held out -------------------------------------------------------------------------------------


def single(rng: Random, task: str) -> Conversation:
    """One question of a task about one held-out picture."""
    if task == "new pairs":
        while True:
            scene, thing = draw_new_pair(rng)
            if sum(t.shape == thing.shape for t in scene.things) == 1:
                turn = color_of(scene, thing)
                return Conversation([scene], [Asked(1, turn)])
    while True:
        scene = draw_content(rng, rng.choice(KINDS), held_out=True)
        asked = ask(rng, scene, task)
        if asked is not None:
            return Conversation([scene], [Asked(1, asked)])


def sample(rng: Random, task: str) -> tuple[list[Image.Image], str, str]:
    """Held-out pictures of about the size the model sees, a question, and its answer."""
    if task == "two pictures":
        shown = [draw_content(rng, rng.choice(KINDS), held_out=True) for _ in range(2)]
        turn = two_pictures(rng, shown)
    else:
        asked = single(rng, task)
        shown, turn = asked.scenes, asked.asked[0].turn
    size = rng.choice(((192, 192), (192, 160), (160, 192), (224, 160), (160, 224)))
    return [paint(rng, scene, size) for scene in shown], turn.question, turn.answer


def samples(task: str, count: int) -> list[tuple[list[Image.Image], str, str]]:
    """The first `count` of a task: always the same."""
    rng = Random(f"held out {task}")
    return [sample(rng, task) for _ in range(count)]
