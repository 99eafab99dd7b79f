"""From a picture to patches: target size, resizing, order of patches. Pixels stay uint8: they are
normalised on the device, which gets an eighth of the bytes that way.

The numbers come from the preprocessor files in the model's folder, and equal what transformers
computes with Pillow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from fastdeploy_core.errors import ConfigError, InvalidRequest

FILES = ("processor_config.json", "preprocessor_config.json")  # transformers 5, and before
MAX_RATIO = 200  # of the longer side to the shorter one, as the families' processors have it
# What a picture with transparency is laid on, as transformers does.
WHITE = (255, 255, 255, 255)
ORIENTATION = 0x0112  # of EXIF, and how a picture with it is turned
TURNS: dict[object, int] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # numbers of Image.Transpose


class PatchRule(msgspec.Struct, frozen=True, tag=True):
    """What the preprocessor files say."""

    patch: int  # side in pixels
    merge: int  # patches of a side that become one vector
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # PaddleOCR-VL: sides below a step grow to it first, with the other side.
    enlarges: bool = False

    @property
    def step(self) -> int:
        """Sides of a resized picture are multiples of it."""
        return self.patch * self.merge


def read_file(folder: Path, names: Sequence[str], part: str) -> tuple[Path, Any]:
    """The first of these files that the folder has, and what it says: all of it, or its `part`.
    ConfigError if there is none."""
    for name in names:
        path = folder / name
        if not path.is_file():
            continue
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error!r}") from None
        if isinstance(found, dict) and (part in found or "image_mean" in found):
            return path, found.get(part, found)
    raise ConfigError(
        f"{folder} has no {' or '.join(names)} with a {part}, so it is not known how large "
        "pictures are shown to the model; copy the file from where the model came from"
    )


def read_image_rule(folder: Path, patch: int, merge: int, *, enlarges: bool = False) -> PatchRule:
    """The rule for pictures of the model in this folder, whose tower has these sizes; ConfigError
    if its files are missing or say something else."""
    rule = read_rule(*read_file(folder, FILES, "image_processor"), patch, merge)
    return msgspec.structs.replace(rule, enlarges=enlarges)


def read_rule(path: Path, found: Any, patch: int, merge: int) -> PatchRule:
    """The rule in a file of the model's folder."""
    try:
        rule = PatchRule(
            patch=int(found.get("patch_size", patch)),
            merge=int(found.get("merge_size", merge)),
            min_pixels=_pixels(found, "min_pixels", "shortest_edge"),
            max_pixels=_pixels(found, "max_pixels", "longest_edge"),
            mean=_channels(found["image_mean"]),
            std=_channels(found["image_std"]),
        )
        is_scaled = abs(float(found.get("rescale_factor", 1 / 255)) * 255 - 1) < 1e-6
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} does not say how pictures are prepared: {error!r}") from None
    # Bicubic is 3 in Pillow.
    others = (("do_resize", True), ("do_normalize", True), ("do_rescale", True), ("resample", 3))
    for name, expected in others:
        if found.get(name, expected) not in (expected, None):
            raise ConfigError(f"{path} has {name}={found[name]!r}; possible: {expected}")
    if not is_scaled:
        raise ConfigError(f"{path} has rescale_factor={found['rescale_factor']}; possible: 1/255")
    if (rule.patch, rule.merge) != (patch, merge) or len(rule.mean) != 3 or len(rule.std) != 3:
        raise ConfigError(
            f"{path} has patches of {rule.patch} merged by {rule.merge} and {len(rule.mean)} "
            f"channels; config.json asks for {patch}, {merge} and 3"
        )
    if not all(map(math.isfinite, (*rule.mean, *rule.std))) or min(rule.std) <= 0:
        raise ConfigError(
            f"{path} has image_mean={rule.mean} and image_std={rule.std}; possible: numbers, and "
            "of image_std above 0"
        )
    if not 0 < rule.min_pixels <= rule.max_pixels:
        raise ConfigError(f"{path} has pixels from {rule.min_pixels} to {rule.max_pixels}")
    return rule


def _pixels(found: Any, old: str, new: str) -> int:
    """A limit, by its name in older files or newer ones."""
    size = found.get("size") or {}
    if not isinstance(size, dict):
        raise TypeError(f"size is {size!r:.40}")
    asked = (found.get(old), size.get(new), size.get(old))
    for value in asked:
        if value is not None:
            return int(value)
    raise KeyError(f"size.{new}")


def _channels(value: Any) -> tuple[float, ...]:
    """One number of each channel, or of all."""
    return tuple(map(float, value if isinstance(value, list) else [value] * 3))


def target_size(width: int, height: int, rule: PatchRule, frames: int = 0) -> tuple[int, int]:
    """Width and height that the model sees; `frames`: of each of so many, whose pixels count
    together. InvalidRequest for a picture that is too narrow."""
    step = rule.step
    if frames and 0 < min(width, height) < step:
        scale = max(step / height, step / width)
        width, height = int(width * scale), int(height * scale)
    if rule.enlarges and 0 < height < step:
        width, height = round(width * step / height), step
    if rule.enlarges and 0 < width < step:
        width, height = step, round(height * step / width)
    long, short = max(width, height), min(width, height)
    if short < 1 or long > MAX_RATIO * short:
        raise InvalidRequest(
            f"a picture of {width}x{height} pixels is too narrow; one side may be at most "
            f"{MAX_RATIO} times the other"
        )
    # Python rounds halves to the even neighbour, and so does the rule.
    w, h = (round(side / step) * step for side in (width, height))
    area, shown = width * height * max(1, frames), w * h * max(1, round(frames / 2) * 2)
    if shown > rule.max_pixels:
        ratio = math.sqrt(area / rule.max_pixels)
        w, h = (max(step, math.floor(side / ratio / step) * step) for side in (width, height))
    elif shown < rule.min_pixels:
        ratio = math.sqrt(rule.min_pixels / area)
        w, h = (math.ceil(side * ratio / step) * step for side in (width, height))
    return w, h


def upright(image: Image.Image) -> Image.Image:
    """The picture as its EXIF data turns it. Data that cannot be read turns nothing, as browsers
    have it; pixels that cannot be read are an error."""
    image.load()
    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION))
    except MemoryError:
        raise
    except Exception:  # Pillow's readers of metadata raise of all kinds
        return image
    return image if turn is None else image.transpose(Image.Transpose(turn))


def as_rgb(image: Image.Image) -> Image.Image:
    """Upright by its EXIF data, in RGB, on white where it is transparent. 16 bits a channel become
    8 by dropping the lower ones."""
    image = upright(image)
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
    and columns."""
    width, height = size = target_size(image.width, image.height, rule)
    patches = cut(np.asarray(resized(image, size)), rule)
    return patches.tobytes(), (1, height // rule.patch, width // rule.patch)


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """As transformers does with Pillow."""
    return image.resize(size, Image.Resampling.BICUBIC)


def cut(pixels: np.ndarray, rule: PatchRule) -> np.ndarray:
    """[height, width, 3] to [n, 3, patch, patch]. The patches that become one vector follow each
    other."""
    p, m = rule.patch, rule.merge
    rows, columns = pixels.shape[0] // p, pixels.shape[1] // p
    split = pixels.reshape(rows // m, m, p, columns // m, m, p, 3)
    return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, p, p)
