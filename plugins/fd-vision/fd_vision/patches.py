"""From a picture to patches: target size, resizing, order of patches. Pixels stay uint8: they are
normalised on the device, which gets an eighth of the bytes that way.

The numbers come from the preprocessor files in the model's folder, and equal what transformers
computes with Pillow.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image, ImageOps

from fastdeploy_core.errors import ConfigError, InvalidRequest

FILES = ("processor_config.json", "preprocessor_config.json")  # transformers 5, and before
MAX_RATIO = 200  # of the longer side to the shorter one, as the families' processors have it
# What a picture with transparency is laid on, as transformers does.
WHITE = (255, 255, 255, 255)


class PatchRule(msgspec.Struct, frozen=True):
    """What the preprocessor files say."""

    patch: int  # side in pixels
    merge: int  # patches of a side that become one vector
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def step(self) -> int:
        """Sides of a resized picture are multiples of it."""
        return self.patch * self.merge


def read_rule(folder: Path, patch: int, merge: int) -> PatchRule:
    """The rule of the model in this folder, whose tower has these sizes; ConfigError if its files
    are missing or say something else."""
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(
            f"{folder} has no {' or '.join(FILES)}, so it is not known how large pictures are "
            "shown to the model; copy the file from where the model came from"
        )
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        found = found.get("image_processor", found)
        size = found.get("size") or {}
        rule = PatchRule(
            patch=int(found.get("patch_size", patch)),
            merge=int(found.get("merge_size", merge)),
            min_pixels=int(found["min_pixels"] if "min_pixels" in found else size["shortest_edge"]),
            max_pixels=int(found["max_pixels"] if "max_pixels" in found else size["longest_edge"]),
            mean=tuple(map(float, found["image_mean"])),
            std=tuple(map(float, found["image_std"])),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} does not say how pictures are prepared: {error!r}") from None
    # Bicubic is 3 in Pillow.
    others = (("do_resize", True), ("do_normalize", True), ("do_rescale", True), ("resample", 3))
    for name, expected in others:
        if found.get(name, expected) not in (expected, None):
            raise ConfigError(f"{path} has {name}={found[name]!r}; possible: {expected}")
    if (rule.patch, rule.merge) != (patch, merge) or len(rule.mean) != 3 or len(rule.std) != 3:
        raise ConfigError(
            f"{path} has patches of {rule.patch} merged by {rule.merge} and {len(rule.mean)} "
            f"channels; config.json asks for {patch}, {merge} and 3"
        )
    if not 0 < rule.min_pixels <= rule.max_pixels:
        raise ConfigError(f"{path} has pixels from {rule.min_pixels} to {rule.max_pixels}")
    return rule


def target_size(width: int, height: int, rule: PatchRule) -> tuple[int, int]:
    """Width and height that the model sees. InvalidRequest for a picture that is too narrow."""
    long, short = max(width, height), min(width, height)
    if short < 1 or long > MAX_RATIO * short:
        raise InvalidRequest(
            f"a picture of {width}x{height} pixels is too narrow; one side may be at most "
            f"{MAX_RATIO} times the other"
        )
    step = rule.step
    # Python rounds halves to the even neighbour, and so does the rule.
    w, h = (round(side / step) * step for side in (width, height))
    if h * w > rule.max_pixels:
        ratio = math.sqrt(height * width / rule.max_pixels)
        w, h = (max(step, math.floor(side / ratio / step) * step) for side in (width, height))
    elif h * w < rule.min_pixels:
        ratio = math.sqrt(rule.min_pixels / (height * width))
        w, h = (math.ceil(side * ratio / step) * step for side in (width, height))
    return w, h


def as_rgb(image: Image.Image) -> Image.Image:
    """Upright by its EXIF data, in RGB, on white where it is transparent. 16 bits a channel become
    8 by dropping the lower ones."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise InvalidRequest("a picture of floating-point numbers is not taken; possible: integers")
    if "A" in image.mode.upper().replace("LAB", "") or "transparency" in image.info:
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, WHITE), clear).convert("RGB")
    return image.convert("RGB")


def patches_of(image: Image.Image, rule: PatchRule) -> tuple[bytes, tuple[int, int, int]]:
    """An RGB picture as patches, [n, 3, patch, patch] uint8, and how many there are in time, rows
    and columns. The patches that become one vector follow each other."""
    width, height = target_size(image.width, image.height, rule)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    p, m = rule.patch, rule.merge
    rows, columns = height // p, width // p
    split = np.asarray(resized).reshape(rows // m, m, p, columns // m, m, p, 3)
    return split.transpose(0, 3, 1, 4, 6, 2, 5).tobytes(), (1, rows, columns)
