"""From a video to frames: which of them the model sees, how large, and reading them from a file.

The numbers come from the preprocessor files in the model's folder; frames are chosen and measured
as transformers' video processors do. Files are read by PyAV (extra `video`), which the process
that decodes imports alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fastdeploy_core.errors import ConfigError, InvalidRequest

from .patches import PatchRule, cut, read_file, read_rule, resized, target_size

FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
FPS = 2.0  # frames that are shown for a second of video, unless the files say otherwise
MAX_FRAMES = 768  # shown of a video, whatever the files say
MAX_SECONDS = 600
MAX_COUNT = 60_000  # frames of a file
# By their first bytes. Other formats may name further files and addresses.
CONTAINERS = ((4, b"ftyp", "mp4"), (0, b"\x1a\x45\xdf\xa3", "matroska"))
CODECS = ("av1", "h264", "hevc", "mpeg4", "vp8", "vp9")


class VideoRule(msgspec.Struct, frozen=True, tag=True):
    """What the preprocessor files say of videos, and what a family makes of them."""

    patches: PatchRule
    # Which frames of n: "even", in steps of equal length from the first on, an even number of them;
    # "steps", as many as there are; "ends", from the first to the last.
    sampling: Literal["even", "steps", "ends"]
    is_joined: bool  # two frames are one patch; else each frame has patches of its own
    counts_all: bool  # the rule's pixels are of all frames together
    fps: float = FPS
    num_frames: int = 0  # exactly so many; 0: by fps
    min_frames: int = 4
    max_frames: int = MAX_FRAMES
    frame_tokens: int = 0  # a frame has at most so many vectors' pixels; 0: no limit of its own
    total_tokens: int = 0  # and all frames together; 0: no limit of their own
    font: str = ""  # the file of letters in which each frame shows its time; empty: it does not


class Frames(msgspec.Struct, frozen=True):
    """The frames of a video that the model sees, in pairs."""

    pixels: bytes  # uint8 patches, frame pair by frame pair
    grid: tuple[int, int, int]  # frames, patches in rows and columns
    seconds: list[float]  # when each frame is shown
    fps: float  # how many of these frames there are for a second of the video


def read_video_rule(
    folder: Path,
    image: PatchRule,
    *,
    sampling: Literal["even", "steps", "ends"],
    is_joined: bool,
    counts_all: bool,
    font: str = "",
    pixels: tuple[int, int] | None = None,
    frames: tuple[int, int] = (4, MAX_FRAMES),
) -> VideoRule:
    """The rule of the model in this folder; ConfigError if its files are missing or say something
    else. `font`: frames show their time in this font, unless the files say otherwise. `pixels`:
    the least and the most of a frame, where the folder has numbers for pictures alone. `frames`:
    the least and the most, where the files do not say."""
    path, found = read_file(folder, FILES, "video_processor")
    if pixels is not None and path.name == FILES[-1]:
        found = {**found, "min_pixels": pixels[0], "max_pixels": pixels[1]}
    letters = ""
    if font and found.get("draw_on_frames", True):
        letters = str(folder / str(found.get("font", font)))
        if not Path(letters).is_file():
            raise ConfigError(
                f"{letters} is missing, in which frames of videos show their time; copy it from "
                "where the model came from"
            )
    patches = read_rule(path, found, image.patch, image.merge)
    try:
        caps = bool(found.get("cap_pixels_per_frame"))
        tokens = int(found.get("max_video_tokens") or (768 if counts_all else 128_000))
        rule = VideoRule(
            patches=patches,
            sampling=sampling,
            is_joined=is_joined,
            counts_all=counts_all,
            fps=float(found.get("fps") or FPS),
            min_frames=int(found.get("min_frames", frames[0])),
            max_frames=min(MAX_FRAMES, int(found.get("max_frames", frames[1]))),
            frame_tokens=tokens if caps and counts_all else 0,
            total_tokens=tokens if caps and not counts_all else 0,
            font=letters,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} does not say how videos are prepared: {error!r}") from None
    if not (rule.fps > 0 and 0 < rule.min_frames <= rule.max_frames):
        raise ConfigError(
            f"{path} has fps={rule.fps} and frames from {rule.min_frames} to {rule.max_frames}"
        )
    return rule


def chosen(total: int, fps: float, rule: VideoRule) -> list[int]:
    """Which of `total` frames the model sees. InvalidRequest if it asks for more than there are."""
    if rule.num_frames > total:
        raise InvalidRequest(
            f"num_frames is {rule.num_frames}, and the video has {total} frames; ask for fewer"
        )
    if rule.sampling == "ends":
        count = rule.num_frames or int(total / fps * rule.fps)
        if not rule.num_frames:
            count = min(max(count, rule.min_frames), rule.max_frames, total)
        found: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
        return found
    number: float
    if rule.sampling == "steps":
        number = rule.num_frames or min(
            max(total / fps * rule.fps, rule.min_frames), rule.max_frames, total
        )
    elif rule.num_frames:
        number = round(rule.num_frames / 2) * 2
    else:
        most = math.floor(min(rule.max_frames, total) / 2) * 2
        number = math.floor(min(max(total / fps * rule.fps, rule.min_frames), most, total) / 2) * 2
    if not number:  # a single frame, which stands for two
        return [0]
    # In float32, as torch counts.
    steps = (np.arange(math.ceil(number)) * (total / number)).astype(np.float32)
    return [int(step) for step in steps if step < total]


def frame_size(width: int, height: int, count: int, rule: VideoRule) -> tuple[int, int]:
    """Width and height that the model sees of each of `count` frames."""
    own, area = rule.patches, rule.patches.step**2
    floor = int(own.min_pixels * 1.05)
    if not rule.counts_all:
        if rule.total_tokens:
            share = int(rule.total_tokens * area * 0.9) * 2 // count
            own = msgspec.structs.replace(own, max_pixels=max(min(own.max_pixels, share), floor))
        return target_size(width, height, own)
    most = own.max_pixels
    if rule.frame_tokens:
        most = max(min(rule.frame_tokens * area, most // count), floor) * count
    whole = msgspec.structs.replace(own, max_pixels=most, enlarges=False)
    return target_size(width, height, whole, frames=count)


def prepare(
    frames: Iterator[Image.Image],
    indices: Sequence[int],
    fps: float,
    total: int,
    rule: VideoRule,
    max_pixels: int,
) -> Frames:
    """Resize the chosen frames one after the other, and cut them into patches."""
    pairs: list[np.ndarray] = []
    size: tuple[int, int] | None = None
    for frame, index in zip(frames, indices, strict=False):
        if size is None:
            size = frame_size(frame.width, frame.height, len(indices), rule)
            if size[0] * size[1] * len(indices) > max_pixels:
                raise InvalidRequest(
                    f"{len(indices)} frames of {size[0]}x{size[1]} pixels are too large; at most "
                    f"{max_pixels} pixels in all are possible"
                )
        if rule.font:
            show_time(frame, index / fps, rule.font)
        # First across, then down, as torch does it; Pillow alone begins with what costs it less.
        across = resized(frame, (size[0], frame.height))
        pairs.append(cut(np.asarray(resized(across, size)), rule.patches))
    if size is None or len(pairs) != len(indices):
        raise InvalidRequest("the video is damaged or incomplete")
    shown = list(indices)
    if len(pairs) % 2:
        pairs.append(pairs[-1])
        shown.append(shown[-1])
    cells = np.stack(pairs)  # [frames, patches, 3, patch, patch]
    if rule.is_joined:
        cells = cells.reshape(-1, 2, *cells.shape[1:]).transpose(0, 2, 3, 1, 4, 5)
    rows, columns = size[1] // rule.patches.patch, size[0] // rule.patches.patch
    return Frames(
        cells.tobytes(),
        (len(shown), rows, columns),
        [index / fps for index in shown],
        len(indices) / total * fps,
    )


def show_time(frame: Image.Image, seconds: float, font: str) -> None:
    """Write the time into a corner of the frame, as ERNIE's processors do."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    size = int(min(frame.size) * 0.1)
    if not size:
        return
    ImageDraw.Draw(frame).text(
        (0, 0),
        f"time: {hours:02d}:{minutes:02d}:{seconds:05.02f}",
        font=ImageFont.truetype(font, size),
        fill=(0, 0, 0),
        stroke_width=int(size * 0.1),
        stroke_fill=(255, 255, 255),
    )


def from_file(data: bytes, rule: VideoRule, max_pixels: int, max_frame_pixels: int) -> Frames:
    """The frames of a file. It is read twice: its frames are counted by their packets, since its
    header may lie, and then decoded up to the last one that is needed."""
    kind = next((k for at, mark, k in CONTAINERS if data[at : at + len(mark)] == mark), None)
    if kind is None:
        raise InvalidRequest("this is no video in a known format; possible: MP4, WebM, Matroska")
    try:
        import av
    except ImportError:
        raise InvalidRequest(
            "this server cannot read video files; the operator runs: pip install 'fd-vision[video]'"
        ) from None
    with av.open(io.BytesIO(data), "r", format=kind) as container:
        stream = next(iter(container.streams.video), None)
        if stream is None:
            raise InvalidRequest("the file has no video in it")
        if stream.codec_context.name not in (*CODECS, "libdav1d", "libvpx", "libvpx-vp9"):
            raise InvalidRequest(f"the video's codec is not taken; possible: {', '.join(CODECS)}")
        if stream.width * stream.height > max_frame_pixels:
            raise InvalidRequest(
                f"frames of {stream.width}x{stream.height} pixels are too large; at most "
                f"{max_frame_pixels} pixels are possible"
            )
        total = 0
        for packet in container.demux(stream):
            total += packet.size > 0 and not packet.is_discard
            if total > MAX_COUNT:
                raise InvalidRequest(f"the video has more than {MAX_COUNT} frames")
        fps = float(stream.average_rate or 0)
    if not total or not math.isfinite(fps) or fps <= 0:
        raise InvalidRequest("the video is damaged or incomplete")
    if total / fps > MAX_SECONDS:
        raise InvalidRequest(
            f"the video lasts {total / fps:.0f} seconds; at most {MAX_SECONDS} are possible"
        )
    indices = chosen(total, fps, rule)
    with av.open(io.BytesIO(data), "r", format=kind) as container:
        decoded = _decoded(container, indices, max_frame_pixels)
        return prepare(decoded, indices, fps, total, rule, max_pixels)


def _decoded(container: Any, indices: Sequence[int], max_pixels: int) -> Iterator[Image.Image]:
    """The frames of these rising numbers, which may repeat, upright."""
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1
    wanted = list(indices)
    for number, frame in enumerate(container.decode(stream)):
        if frame.width * frame.height > max_pixels:
            raise InvalidRequest(f"a frame has {frame.width}x{frame.height} pixels: too large")
        if wanted and wanted[0] == number:
            image = frame.to_image()
            turn = round(getattr(frame, "rotation", 0) / 90) % 4
            image = image.rotate(90 * turn, expand=True) if turn else image
            while wanted and wanted[0] == number:
                yield image
                wanted.pop(0)
        if not wanted:
            return
