"""Pictures and what is asked about them, drawn from a random generator.

A scene is a background with shapes in a grid of three by three places, a word or a number, or both.
One in ten contents is held out: a scene of `held_out` was never trained on, whatever its exact
places, sizes and shades. Some pairs of colour and shape are held out altogether.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from zlib import crc32

from PIL import Image, ImageDraw, ImageFilter, ImageFont

COLORS = {
    "red": (220, 30, 35), "green": (35, 160, 60), "blue": (35, 70, 215),
    "yellow": (245, 220, 40), "orange": (245, 130, 25), "purple": (130, 45, 160),
    "pink": (250, 140, 190), "black": (15, 15, 15), "white": (246, 246, 246),
    "gray": (128, 128, 128),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring", "heart")
PLACES = {
    (0, 0): "at the top left", (1, 0): "at the top", (2, 0): "at the top right",
    (0, 1): "on the left", (1, 1): "in the center", (2, 1): "on the right",
    (0, 2): "at the bottom left", (1, 2): "at the bottom", (2, 2): "at the bottom right",
}  # fmt: skip
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
LETTERS, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
TASKS = (
    *("color", "shape", "where", "what at", "count", "count some", "is there", "relation"),
    *("background", "word", "number", "text color", "describe"),
)
"""What is asked about one picture; each is scored by itself."""


@dataclass(frozen=True)
class Thing:
    """A shape in one of nine places."""

    shape: str
    color: str
    place: tuple[int, int]  # column, row

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """What a picture shows."""

    background: str
    things: tuple[Thing, ...] = ()  # in reading order
    text: str = ""  # letters or digits, in the middle row
    text_color: str = ""

    @property
    def is_held_out(self) -> bool:
        """Whether its content is one that is never trained on."""
        things = sorted((t.color, t.shape, t.place) for t in self.things)
        is_unseen = bool(things) and crc32(repr(things).encode()) % 10 == 0
        return is_unseen or (bool(self.text) and crc32(self.text.encode()) % 10 == 0)


@dataclass(frozen=True)
class Turn:
    """A question and its only right answer."""

    task: str
    question: str
    answer: str


def is_new_pair(color: str, shape: str) -> bool:
    """Whether no picture of the training shows a shape in this colour."""
    return crc32(f"{color} {shape}".encode()) % 12 == 0


def _text(rng: Random) -> str:
    if rng.random() < 0.4:
        return "".join(rng.choices(DIGITS, k=rng.randint(1, 4)))
    length = rng.choice((2, 3, 3, 4, 4, 5))
    if rng.random() < 0.5:
        return "".join(rng.choices(LETTERS, k=length))
    start = rng.random() < 0.5
    kinds = ("BCDFGHJKLMNPQRSTVWXYZ", "AEIOUY")
    return "".join(rng.choice(kinds[(n + start) % 2]) for n in range(length))


def _draw_content(rng: Random, kind: str, new_pairs: bool) -> Scene:
    background = rng.choice(["white", "white", "white", "black", *COLORS])
    colors = [c for c in COLORS if c != background]
    text = _text(rng) if kind in ("text", "both") else ""
    things: list[Thing] = []
    if kind != "text":
        rows = (0, 2) if text else (0, 1, 2)
        places = rng.sample(
            [(x, y) for y in rows for x in range(3)], rng.choice((1, 2, 3, 4, 5, 6))
        )
        few_colors, few_shapes = rng.sample(colors, 3), rng.sample(SHAPES, 3)
        for place in sorted(places, key=lambda p: (p[1], p[0])):
            while True:
                # Scenes of few kinds have several of one kind to count.
                color = rng.choice(few_colors if rng.random() < 0.6 else colors)
                shape = rng.choice(few_shapes if rng.random() < 0.6 else SHAPES)
                if new_pairs or not is_new_pair(color, shape):
                    break
            things.append(Thing(shape, color, place))
    return Scene(background, tuple(things), text, rng.choice(colors) if text else "")


def draw_content(rng: Random, kind: str, *, held_out: bool = False) -> Scene:
    """A scene of a kind (shapes, text, both) that is or is not held out."""
    while True:
        scene = _draw_content(rng, kind, new_pairs=False)
        if scene.is_held_out == held_out:
            return scene


def draw_new_pair(rng: Random) -> tuple[Scene, Thing]:
    """A scene with a shape in a colour that no picture of the training shows it in."""
    while True:
        scene = _draw_content(rng, "shapes", new_pairs=True)
        for thing in scene.things:
            if is_new_pair(thing.color, thing.shape):
                return scene, thing


# -- questions ------------------------------------------------------------------------------------


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _counted(count: int, name: str) -> str:
    verb = "is" if count == 1 else "are"
    plural = name if count == 1 else name + ("es" if name.endswith("s") else "s")
    return f"There {verb} {NUMBERS[count]} {plural}."


def color_of(scene: Scene, thing: Thing) -> Turn:
    """The colour of a shape of which there is one."""
    return Turn(
        "color", f"What color is the {thing.shape}?", f"The {thing.shape} is {thing.color}."
    )


def _one_of_a_kind(rng: Random, scene: Scene, kind: Callable[[Thing], object]) -> Thing | None:
    kinds = [kind(t) for t in scene.things]
    alone = [t for t in scene.things if kinds.count(kind(t)) == 1]
    return rng.choice(alone) if alone else None


def _about_shapes(rng: Random, scene: Scene, task: str) -> tuple[list[str], str] | None:
    things = scene.things
    if not things:
        return None
    if task == "color" and (thing := _one_of_a_kind(rng, scene, lambda t: t.shape)):
        turn = color_of(scene, thing)
        return [turn.question, f"Which color does the {thing.shape} have?"], turn.answer
    if task == "shape" and (thing := _one_of_a_kind(rng, scene, lambda t: t.color)):
        asked = [f"What shape is {thing.color}?", f"Which shape is the {thing.color} one?"]
        return asked, f"The {thing.color} shape is {_a(thing.shape)}."
    if task == "where" and (thing := _one_of_a_kind(rng, scene, lambda t: t.name)):
        asked = [f"Where is the {thing.name}?", f"Where in the picture is the {thing.name}?"]
        return asked, f"The {thing.name} is {PLACES[thing.place]}."
    if task == "what at":
        free = [p for p in PLACES if not (scene.text and p[1] == 1)]
        place = rng.choice(things).place if rng.random() < 0.7 else rng.choice(free)
        found = next((t for t in things if t.place == place), None)
        asked = [f"What is {PLACES[place]}?", f"What do you see {PLACES[place]}?"]
        return asked, f"{_a(found.name).capitalize()}." if found else "Nothing."
    if task == "count":
        asked = ["How many shapes are there?", "How many shapes are in the picture?"]
        return asked, _counted(len(things), "shape")
    if task == "count some":
        if rng.random() < 0.5:
            shape = rng.choice([t.shape for t in things] * 3 + list(SHAPES))
            name, count = shape, sum(t.shape == shape for t in things)
        else:
            color = rng.choice([t.color for t in things] * 3 + list(COLORS))
            name, count = f"{color} shape", sum(t.color == color for t in things)
        plural = name + ("es" if name.endswith("s") else "s")
        asked = [f"How many {plural} are there?", f"Count the {plural}."]
        return asked, _counted(count, name)
    if task == "is there":
        shape, color = rng.choice(SHAPES), rng.choice(list(COLORS))
        if rng.random() < 0.5:
            shape, color = (thing := rng.choice(things)).shape, thing.color
        elif rng.random() < 0.7:  # one of the two is there, so that both have to be looked at
            shape = rng.choice(things).shape
        name = f"{color} {shape}"
        asked = [f"Is there {_a(name)}?", f"Do you see {_a(name)}?"]
        return asked, "Yes." if any(t.name == name for t in things) else "No."
    if task == "relation":
        alone = [t for t in things if sum(o.shape == t.shape for o in things) == 1]
        words = {(0, 1): "left of", (0, -1): "right of", (1, 1): "above", (1, -1): "below"}
        (axis, sign), word = rng.choice(list(words.items()))
        pairs = [(a, b) for a in alone for b in alone if a.place[axis] != b.place[axis]]
        if not pairs:
            return None
        first, second = rng.choice(pairs)
        asked = [f"Is the {first.shape} {word} the {second.shape}?"]
        is_so = (second.place[axis] - first.place[axis]) * sign > 0
        # One word says too little to learn from: the places come first.
        said = [f"he {thing.shape} is {PLACES[thing.place]}" for thing in (first, second)]
        return asked, f"T{said[0]} and t{said[1]}. {'Yes' if is_so else 'No'}."
    return None


def ask(rng: Random, scene: Scene, task: str) -> Turn | None:
    """A question of this task about a scene, or None if it has nothing to ask for."""
    found: tuple[list[str], str] | None = None
    is_number = scene.text.isdigit()
    word = "number" if is_number else "word"
    if task == "background":
        asked = ["What color is the background?", "Which color does the background have?"]
        found = asked, f"The background is {scene.background}."
    elif task == "word" and scene.text and not is_number:
        asked = ["What does the picture say?", "Read the word.", "What is written here?"]
        found = asked, f"It says {scene.text}."
    elif task == "number" and is_number:
        asked = ["Which number is shown?", "Read the number.", "What number do you see?"]
        found = asked, f"The number is {scene.text}."
    elif task == "text color" and scene.text:
        found = [f"What color is the {word}?"], f"The {word} is {scene.text_color}."
    elif task == "describe":
        found = _description(scene, word)
    else:
        found = _about_shapes(rng, scene, task)
    if found is None:
        return None
    question = rng.choice(found[0])
    if rng.random() < 0.1:
        question = question.lower().rstrip("?.")
    return Turn(task, question, found[1])


def _description(scene: Scene, word: str) -> tuple[list[str], str] | None:
    if len(scene.things) > 3:
        return None
    parts = [f"{_a(t.name)} {PLACES[t.place]}" for t in scene.things]
    if scene.text:
        parts.append(f"the {word} {scene.text} in {scene.text_color}")
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    asked = ["What is in the picture?", "What do you see?", "Describe the picture."]
    return asked, f"{listed[0].upper()}{listed[1:]}."


# -- pixels ---------------------------------------------------------------------------------------


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """The font inside Pillow (Aileron, CC0)."""
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def shade(rng: Random, color: str) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, c + rng.randint(-12, 12))) for c in COLORS[color])
    return red, green, blue


def outline(shape: str) -> list[tuple[float, float]]:
    """Corners in a circle of radius 1."""

    def around(
        count: int, first: float, radii: tuple[float, ...] = (1.0,)
    ) -> list[tuple[float, float]]:
        turns = [first + n / count for n in range(count)]
        sizes = [radii[n % len(radii)] for n in range(count)]
        return [
            (r * math.cos(2 * math.pi * t), r * math.sin(2 * math.pi * t))
            for t, r in zip(turns, sizes, strict=True)
        ]

    if shape == "square":
        return around(4, 0.125)
    if shape == "diamond":
        return [(0.7 * x, y) for x, y in around(4, 0.0)]
    if shape == "triangle":
        return around(3, -0.25)
    if shape == "star":
        return around(10, -0.25, (1.0, 0.42))
    if shape == "heart":
        turns = [2 * math.pi * n / 24 for n in range(24)]
        return [
            (
                math.sin(t) ** 3,
                -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t))
                / 16,
            )
            for t in turns
        ]
    w = 0.33  # cross
    half = [(-w, -1), (w, -1), (w, -w), (1, -w), (1, w), (w, w)]
    return [*half, *((-x, -y) for x, y in half)]


def _draw_thing(
    rng: Random, draw: ImageDraw.ImageDraw, thing: Thing, cell: tuple[float, float]
) -> None:
    """Draw a shape somewhere in its place."""
    side = min(cell)
    radius = side * rng.uniform(0.24, 0.44)
    x, y = (
        (n + 0.5) * size + rng.uniform(-1, 1) * max(0.0, 0.47 * size - radius)
        for n, size in zip(thing.place, cell, strict=True)
    )
    color = shade(rng, thing.color)
    if thing.shape in ("circle", "ring"):
        box = (x - radius, y - radius, x + radius, y + radius)
        if thing.shape == "circle":
            draw.ellipse(box, fill=color)
        else:
            draw.ellipse(box, outline=color, width=max(2, round(radius * rng.uniform(0.25, 0.4))))
        return
    turn = math.radians(rng.uniform(-10, 10))
    c, s = radius * math.cos(turn), radius * math.sin(turn)
    draw.polygon([(x + c * a - s * b, y + s * a + c * b) for a, b in outline(thing.shape)], color)


def _draw_text(rng: Random, image: Image.Image, scene: Scene) -> None:
    """Write the text: across the picture, or across its middle row."""
    width, height = image.size
    room = (width * 0.92, height * (0.34 if scene.things else 0.8))
    stroke = rng.choice((0, 0, 1, 2))
    size = rng.uniform(0.2, 0.36) * min(width, height)
    left, top, right, bottom = font(64).getbbox(scene.text, stroke_width=stroke)
    size = min(size, 64 * room[0] / (right - left), 64 * room[1] / (bottom - top))
    letters = font(max(9, round(size)))
    left, top, right, bottom = letters.getbbox(scene.text, stroke_width=stroke)
    mask = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
    pen = ImageDraw.Draw(mask)
    pen.text((1 - left, 1 - top), scene.text, 255, letters, stroke_width=stroke)
    if rng.random() < 0.5:
        mask = mask.rotate(rng.uniform(-8, 8), Image.Resampling.BILINEAR, expand=True)
    free = width - mask.width, (room[1] if scene.things else height) - mask.height
    x = rng.uniform(0, max(0, free[0]))
    y = (height - room[1]) / 2 * bool(scene.things) + rng.uniform(0, max(0, free[1]))
    image.paste(shade(rng, scene.text_color), (round(x), round(y)), mask)


def paint(rng: Random, scene: Scene, size: tuple[int, int]) -> Image.Image:
    """The scene as an RGB picture of this width and height, with the traces of other sizes and of
    compression."""
    scale = rng.uniform(0.8, 2.0) if rng.random() < 0.7 else 1.0
    drawn = round(size[0] * scale), round(size[1] * scale)
    image = Image.new("RGB", drawn, shade(rng, scene.background))
    draw = ImageDraw.Draw(image)
    cell = drawn[0] / 3, drawn[1] / 3
    for thing in scene.things:
        _draw_thing(rng, draw, thing, cell)
    if scene.text:
        _draw_text(rng, image, scene)
    if rng.random() < 0.1:
        image = image.filter(ImageFilter.BoxBlur(rng.uniform(0.3, 1.0)))
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    if rng.random() < 0.15:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.randint(40, 95))
        image = Image.open(file).convert("RGB")
    return image


EXAMPLE = Scene(
    "white",
    (Thing("circle", "red", (0, 0)), Thing("star", "blue", (2, 2))),
    "HELLO",
    "green",
)
"""Of examples/shapes.png, made by `python scenes.py FILE`."""

if __name__ == "__main__":
    paint(Random(3), EXAMPLE, (400, 400)).save(sys.argv[1])
