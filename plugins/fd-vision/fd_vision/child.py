"""The process in which pictures and videos are decoded: what comes from strangers meets their
decoders here, under limits, and nowhere else.

Frames are a 4-byte big-endian length and MessagePack; an empty one says that jobs may come. Only
pool.py starts this process, and may kill it.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
from PIL import Image, UnidentifiedImageError

from fastdeploy_core.errors import InvalidRequest

from . import video
from .patches import PatchRule, as_rgb, patches_of, target_size
from .video import VideoRule

HEADER = struct.Struct(">I")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
# Of a JPEG, each of which passes over the whole picture; encoders make up to about ten. MPO has
# several pictures.
MAX_SCANS, SCAN = 50, b"\xff\xda"


class Job(msgspec.Struct, kw_only=True):
    """One picture or video."""

    source: bytes
    rule: PatchRule | VideoRule
    max_pixels: int  # of the picture, or of a frame, as it comes
    max_total: int = 0  # of all frames of a video as the model sees them
    time_limit_s: float
    # Width and height where the source is RGB pixels; None: it is a file of one of FORMATS.
    size: tuple[int, int] | None = None
    lengths: tuple[int, ...] = ()  # where the source is several pictures: the bytes of each
    fps: float = 0.0  # of frames that are given one by one

    @property
    def word(self) -> str:
        """What it is, for errors."""
        return "picture" if isinstance(self.rule, PatchRule) else "video"


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Its patches, or why there are none."""

    patches: bytes = b""
    grid: tuple[int, int, int] = (0, 0, 0)  # frames, patches in rows and columns
    num_pixels: int = 0  # of the picture as it came, of a video's frames as the model sees them
    seconds: list[float] = []  # when each frame of a video is shown
    fps: float = 0.0  # frames for a second of the video
    error: str = ""


def read_frame(stream: IO[bytes]) -> bytes:
    """Read one frame; empty at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return b""
    size = HEADER.unpack(header)[0]
    body = stream.read(size)
    return body if len(body) == size else b""


def write_frame(stream: IO[bytes], body: bytes) -> None:
    """Write one frame."""
    stream.write(HEADER.pack(len(body)))
    stream.write(body)
    stream.flush()


def prepare(job: Job) -> Answer:
    """The patches of one picture or video; InvalidRequest says why there are none."""
    if isinstance(job.rule, VideoRule):
        made = _video(job, job.rule)
        frames, rows, columns = made.grid
        pixels = frames * rows * columns * job.rule.patches.patch**2
        return Answer(
            patches=made.pixels, grid=made.grid, num_pixels=pixels, seconds=made.seconds,
            fps=made.fps,
        )  # fmt: skip
    image, pixels = _picture(job.source, job, job.rule)
    patches, grid = patches_of(image, job.rule)
    return Answer(patches=patches, grid=grid, num_pixels=pixels)


def _picture(source: bytes, job: Job, rule: PatchRule) -> tuple[Image.Image, int]:
    """A picture in RGB, and the pixels that it came with."""
    if job.size is not None:
        width, height = job.size
        _check_size(width, height, job, rule)
        return Image.frombytes("RGB", job.size, source), width * height
    try:
        opened = Image.open(io.BytesIO(source), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequest(_unknown(source)) from None
    width, height = opened.size
    _check_size(width, height, job, rule)  # the header's, before anything is decoded
    if opened.format in ("JPEG", "MPO") and source.count(SCAN) > MAX_SCANS:
        raise InvalidRequest(f"a JPEG of more than {MAX_SCANS} scans is not taken")
    # MPO is how cameras keep a smaller picture, or a map of brightness, behind a JPEG.
    if opened.format != "MPO" and getattr(opened, "is_animated", False):
        raise InvalidRequest("an animated picture is not taken; send one of its frames")
    return as_rgb(opened), width * height


def _video(job: Job, rule: VideoRule) -> video.Frames:
    if job.size is None and not job.lengths:
        return video.from_file(job.source, rule, job.max_total, job.max_pixels)
    lengths = job.lengths
    if job.size is not None:
        one = 3 * job.size[0] * job.size[1]
        lengths = (one,) * (len(job.source) // one)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    fps = job.fps or rule.fps
    indices = video.chosen(len(lengths), fps, rule) if rule.num_frames else range(len(lengths))

    def frames() -> Iterator[Image.Image]:
        for index in indices:
            source = job.source[starts[index] : starts[index] + lengths[index]]
            yield _picture(source, job, rule.patches)[0]

    return video.prepare(frames(), indices, fps, len(lengths), rule, job.max_total)


def _check_size(width: int, height: int, job: Job, rule: PatchRule) -> None:
    if width * height > job.max_pixels:
        raise InvalidRequest(
            f"a picture of {width}x{height} pixels is too large; at most {job.max_pixels} pixels "
            "are possible"
        )
    target_size(width, height, rule)


def _unknown(source: bytes) -> str:
    possible = f"possible: {', '.join(FORMATS)}"
    if b"<svg" in source[:4096].lower():
        return f"SVG is a program rather than a picture and is not taken; {possible}"
    return f"this is no picture in a known format, or a damaged one; {possible}"


def answer(job: Job) -> Answer:
    """Every failure becomes an answer, except the end of the process. A library's own words stay
    here."""
    try:
        return prepare(job)
    except InvalidRequest as error:
        return Answer(error=str(error))
    except MemoryError:
        return Answer(error=f"the {job.word} needs too much memory to decode")
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return Answer(error=f"the {job.word} is damaged or incomplete")


def limit_resources(extra_bytes: int) -> None:
    """The address space grows by at most this much; no file can be written."""
    try:
        import resource
    except ImportError:  # not a POSIX system: only the time limit applies
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + extra_bytes
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(memory_bytes: int) -> int:
    """Serve until stdin ends."""
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = io.StringIO()  # a library that prints must not write into the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes stdin
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # a job's own limit is smaller, and a refusal
    Image.init()
    limit_resources(memory_bytes)
    write_frame(answers, b"")
    while body := read_frame(jobs):
        job = msgspec.msgpack.decode(body, type=Job)
        # A parent that is gone cannot kill this process; then the alarm does.
        signal.alarm(math.ceil(job.time_limit_s) + 2)
        made = answer(job)
        signal.alarm(0)
        write_frame(answers, msgspec.msgpack.encode(made))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
