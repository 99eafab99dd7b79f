"""The pictures of the training: what `scenes.paint` draws on a processor one by one, drawn many at
a time by the device that trains.

A picture is a background with sprites: shapes and letters, cut out of tiles, each turned, scaled,
coloured and put somewhere. A worker process says which; the device samples all their pixels at
once. Held-out pictures are never drawn here.
"""

from __future__ import annotations

import math
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from scenes import DIGITS, LETTERS, SHAPES, Scene, Thing, font, outline, shade

TILE, RADIUS, LETTER = 96, 40, 64  # pixels: a tile's side, a shape in it, a font in it
LEFT, TOP = 16, 8  # where a letter begins in its tile
RINGS, STROKES = (0.25, 0.32, 0.4), (0, 1, 2, 3)
MOST = 11  # sprites of a picture
FIELDS = 9  # tile, x, y, scale, angle, red, green, blue, whether its edges are hard
TILES = {
    name: n
    for n, name in enumerate(
        [
            *(shape for shape in SHAPES if shape != "ring"),
            *(f"ring {width}" for width in RINGS),
            *(f"{letter} {stroke}" for letter in LETTERS + DIGITS for stroke in STROKES),
        ]
    )
}


def _tile(name: str) -> np.ndarray:
    """[TILE, TILE] float32: how much of each pixel is covered."""
    first, _, second = name.partition(" ")
    if len(first) == 1:
        image = Image.new("L", (TILE, TILE))
        pen = ImageDraw.Draw(image)
        pen.text((LEFT, TOP), first, 255, font(LETTER), stroke_width=int(second))
        return np.asarray(image, np.float32) / 255
    fine = 4
    image = Image.new("L", (TILE * fine, TILE * fine))
    draw, middle, radius = ImageDraw.Draw(image), TILE * fine / 2, RADIUS * fine
    box = (middle - radius, middle - radius, middle + radius, middle + radius)
    if first == "circle":
        draw.ellipse(box, fill=255)
    elif first == "ring":
        draw.ellipse(box, outline=255, width=round(float(second) * radius))
    else:
        draw.polygon([(middle + radius * x, middle + radius * y) for x, y in outline(first)], 255)
    return np.asarray(image.reduce(fine), np.float32) / 255


def _sprite(tile: str, where: tuple[float, float], scale: float, angle: float) -> list[float]:
    return [TILES[tile], *where, scale, angle]


def _shape(rng: Random, thing: Thing, cell: tuple[float, float]) -> list[float]:
    radius = min(cell) * rng.uniform(0.24, 0.44)
    x, y = (
        (n + 0.5) * size + rng.uniform(-1, 1) * max(0.0, 0.47 * size - radius)
        for n, size in zip(thing.place, cell, strict=True)
    )
    tile, turn = thing.shape, math.radians(rng.uniform(-10, 10))
    if tile == "ring":
        tile = f"ring {rng.choice(RINGS)}"
    hard = float(rng.random() < 0.7)
    return [*_sprite(tile, (x, y), radius / RADIUS, turn), *shade(rng, thing.color), hard]


def _letters(rng: Random, scene: Scene, width: int, height: int) -> list[list[float]]:
    text, stroke = scene.text, rng.choice((0, 0, *STROKES))
    turn = math.radians(rng.uniform(-8, 8)) if rng.random() < 0.5 else 0.0
    left, top, right, bottom = font(LETTER).getbbox(text, stroke_width=stroke)
    room = (width * 0.92, height * (0.34 if scene.things else 0.8))
    cos, sin = math.cos(turn), abs(math.sin(turn))
    wide = (right - left) * cos + (bottom - top) * sin  # of a pixel of the tile
    tall = (right - left) * sin + (bottom - top) * cos
    scale = rng.uniform(0.18, 0.4) * min(width, height) / LETTER
    scale = min(scale, room[0] / wide, room[1] / tall)
    free = width - wide * scale, (room[1] if scene.things else height) - tall * scale
    x = (wide * scale + free[0]) / 2 + rng.uniform(-0.5, 0.5) * max(0.0, free[0])
    y = (tall * scale + free[1]) / 2 + rng.uniform(-0.5, 0.5) * max(0.0, free[1])
    y += (height - room[1]) / 2 * bool(scene.things)
    color, middle = shade(rng, scene.text_color), ((left + right) / 2, (top + bottom) / 2)
    found = []
    for n, letter in enumerate(text):
        across = font(LETTER).getlength(text[:n]) + TILE / 2 - LEFT - middle[0]
        down = TILE / 2 - TOP - middle[1]
        where = (
            x + scale * (across * math.cos(turn) - down * math.sin(turn)),
            y + scale * (across * math.sin(turn) + down * math.cos(turn)),
        )
        found.append([*_sprite(f"{letter} {stroke}", where, scale, turn), *color, 0.0])
    return found


def sprites(rng: Random, scene: Scene, size: tuple[int, int]) -> np.ndarray:
    """[1 + MOST, FIELDS] float32 of a picture of this width and height: its background's colour,
    then its sprites; unused ones have a scale of 0."""
    found = np.zeros((1 + MOST, FIELDS), np.float32)
    found[0, :3] = shade(rng, scene.background)
    cell = size[0] / 3, size[1] / 3
    rows = [_shape(rng, thing, cell) for thing in scene.things]
    if scene.text:
        rows += _letters(rng, scene, *size)
    found[1 : 1 + len(rows)] = rows or np.zeros((0, FIELDS))
    return found


class Painter:
    """Draws on a device."""

    def __init__(self, device: torch.device) -> None:
        self._tiles = torch.from_numpy(np.stack([_tile(name) for name in TILES])).to(device)

    @torch.no_grad()
    def __call__(self, drawn: Tensor, size: tuple[int, int]) -> Tensor:
        """drawn: [n, 1 + MOST, FIELDS]; size: width and height. [n, height, width, 3] uint8."""
        return torch.cat([self._paint(part, *size) for part in drawn.split(128)])

    def _paint(self, drawn: Tensor, width: int, height: int) -> Tensor:
        count = len(drawn)
        tile, x, y, factor, angle, *color, hard = drawn[:, 1:].unbind(-1)
        across = torch.arange(width, device=drawn.device) + 0.5
        down = torch.arange(height, device=drawn.device) + 0.5
        dx = across - x[..., None, None]  # [n, MOST, 1, width]
        dy = down[:, None] - y[..., None, None]  # [n, MOST, height, 1]
        unit = 2 / TILE / factor.clamp(min=1e-6)  # a sprite of scale 0 is sampled far outside
        cos, sin = ((f(angle) * unit)[..., None, None] for f in (torch.cos, torch.sin))
        grid = torch.stack((dx * cos + dy * sin, dy * cos - dx * sin), -1).flatten(0, 1)
        source = self._tiles[tile.long()].flatten(0, 1)[:, None]
        covered = F.grid_sample(source, grid, align_corners=False)
        covered = covered.view(count, MOST, height * width)
        covered = torch.where(hard[..., None] > 0, (covered > 0.5).float(), covered)
        covered = covered * (factor > 0)[..., None]
        total = covered.sum(1, keepdim=True)
        covered = covered / total.clamp(min=1)
        free = 1 - total.clamp(max=1)
        colors = torch.stack(color, 1)  # [n, 3, MOST]
        image = torch.bmm(colors, covered) + drawn[:, 0, :3, None] * free
        image = image.view(count, 3, height, width)
        chance = torch.rand(3, count, 1, 1, 1, device=drawn.device)
        blurred = F.avg_pool2d(F.pad(image, (1, 1, 1, 1), mode="replicate"), 3, 1)
        image = torch.where(chance[0] < 0.1, blurred, image)
        noise = torch.randn_like(image) * 8 * chance[2] * (chance[1] < 0.2)
        return (image + noise).round().clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()
