"""The process in which pictures are decoded: what comes from strangers meets their decoders here,
under limits, and nowhere else.

Frames are a 4-byte big-endian length and MessagePack. Only pool.py starts this process, and may
kill it.
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
from pathlib import Path
from typing import IO

import msgspec
from PIL import Image, UnidentifiedImageError

from fastdeploy_core.errors import InvalidRequest

from .patches import PatchRule, as_rgb, patches_of, target_size

HEADER = struct.Struct(">I")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF")


class Job(msgspec.Struct, kw_only=True):
    """One picture."""

    source: bytes
    rule: PatchRule
    max_pixels: int  # of the picture as it comes
    time_limit_s: float
    # Width and height where the source is RGB pixels; None: it is a file of one of FORMATS.
    size: tuple[int, int] | None = None


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Its patches, or why there are none."""

    patches: bytes = b""
    grid: tuple[int, int, int] = (0, 0, 0)
    num_pixels: int = 0  # of the picture as it came
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
    """The patches of one picture; InvalidRequest says why there are none."""
    if job.size is not None:
        width, height = job.size
        _check_size(width, height, job)
        image = Image.frombytes("RGB", job.size, job.source)
    else:
        try:
            opened = Image.open(io.BytesIO(job.source), formats=FORMATS)
        except UnidentifiedImageError:
            raise InvalidRequest(_unknown(job.source)) from None
        width, height = opened.size
        _check_size(width, height, job)  # the header's, before anything is decoded
        if getattr(opened, "is_animated", False):
            raise InvalidRequest("an animated picture is not taken; send one of its frames")
        image = as_rgb(opened)
    patches, grid = patches_of(image, job.rule)
    return Answer(patches=patches, grid=grid, num_pixels=width * height)


def _check_size(width: int, height: int, job: Job) -> None:
    if width * height > job.max_pixels:
        raise InvalidRequest(
            f"a picture of {width}x{height} pixels is too large; at most {job.max_pixels} pixels "
            "are possible"
        )
    target_size(width, height, job.rule)


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
        return Answer(error="the picture needs too much memory to decode")
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return Answer(error="the picture is damaged or incomplete")


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
