"""Damaged and lying pictures over HTTP: each gets a 400 that names its part, the next request
works, and memory returns."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import re
import struct
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_hostile import FRAMES, chunk, encoded, png
from tiny import picture

from tests.server_process import ServerProcess

SIGNATURE = b"\x89PNG\r\n\x1a\n"
LARGE = picture(120, 90, 3)
FILES = {
    "png": encoded(LARGE), "gray png": encoded(LARGE.convert("L")),
    "palette png": encoded(LARGE.convert("P")), "16 bit png": encoded(Image.new("I;16", (40, 30))),
    "jpeg": encoded(LARGE, "JPEG"), "progressive jpeg": encoded(LARGE, "JPEG", progressive=True),
    "cmyk jpeg": encoded(LARGE.convert("CMYK"), "JPEG"), "webp": encoded(LARGE, "WEBP"),
    "lossless webp": encoded(LARGE, "WEBP", lossless=True), "gif": encoded(LARGE, "GIF"),
    "bmp": encoded(LARGE, "BMP"),
}  # fmt: skip


def header(width: int = 8, height: int = 8, *kind: int) -> bytes:
    """A PNG's first chunk. kind: bit depth, colour, compression, filter, interlacing."""
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, *(kind or (8, 2, 0, 0, 0))))


def pixels(count: int = 8 * 25) -> bytes:
    return chunk(b"IDAT", zlib.compress(bytes(count)))


END = chunk(b"IEND", b"")
BROKEN = {
    "png: no header": SIGNATURE + pixels() + END,
    "png: no pixels": SIGNATURE + header() + END,
    "png: a header of 5 bytes": SIGNATURE + chunk(b"IHDR", bytes(5)) + pixels() + END,
    "png: a header with a wrong checksum": SIGNATURE + header()[:-1] + b"!" + pixels() + END,
    "png: too few pixels": SIGNATURE + header() + pixels(30) + END,
    "png: pixels that do not inflate": SIGNATURE + header() + chunk(b"IDAT", b"no zlib") + END,
    "png: a chunk longer than the file": SIGNATURE + header() + b"\x7f\xff\xff\xffIDAT" + bytes(20),
    "png: 0 wide": SIGNATURE + header(0, 8) + pixels() + END,
    "png: 0 high": SIGNATURE + header(8, 0) + pixels() + END,
    "png: 2^31 wide": SIGNATURE + header(2**31, 8) + pixels() + END,
    "png: 5 bits": SIGNATURE + header(8, 8, 5, 2, 0, 0, 0) + pixels() + END,
    "png: an unknown colour": SIGNATURE + header(8, 8, 8, 9, 0, 0, 0) + pixels() + END,
    "png: an unknown row filter": SIGNATURE + header() + chunk(
        b"IDAT", zlib.compress(b"\x09" + bytes(8 * 25))) + END,
    "png: two headers": SIGNATURE + header() + header(4000, 9000) + pixels() + END,
    "png: in the form of a Mac": b"\0" * 128 + FILES["png"],
    "png: through a text editor": FILES["png"].replace(b"\r\n", b"\n"),
    "png: as UTF-8": FILES["png"].decode("latin-1").encode(),
    "png: in base64 twice": base64.b64encode(FILES["png"]),
    "png: 40,000 high": png(1, 40000, bytes(2 * 40000)),
    "jpeg: only start and end": b"\xff\xd8\xff\xd9",
    "jpeg: no tables": FILES["jpeg"].replace(b"\xff\xdb", b"\xff\xfe"),
    "jpeg: no size": FILES["jpeg"].replace(b"\xff\xc0", b"\xff\xfe"),
    "jpeg: lossless": FILES["jpeg"].replace(b"\xff\xc0", b"\xff\xc3"),
    "jpeg: 12 bits": FILES["jpeg"].replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
    "jpeg: 0 high": FILES["jpeg"].replace(struct.pack(">HH", 90, 120), struct.pack(">HH", 0, 120)),
    "jpeg: 0 wide": FILES["jpeg"].replace(struct.pack(">HH", 90, 120), struct.pack(">HH", 90, 0)),
    "jpeg: 65,535 by 65,535": FILES["jpeg"].replace(struct.pack(">HH", 90, 120), b"\xff" * 4),
    "jpeg: 65,000 high": FILES["jpeg"].replace(
        struct.pack(">HH", 90, 120), struct.pack(">HH", 65000, 120)),
    "jpeg: without its start": FILES["jpeg"][2:],
    "gif: no frame": b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0, 0, 0) + b";",
    "gif: a frame of nothing": b"GIF89a" + struct.pack("<HHBBB", 0, 0, 0, 0, 0) + b";",
    "gif: 65,535 by 65,535": FILES["gif"].replace(
        struct.pack("<HH", 120, 90), b"\xff" * 4),
    "gif: an unknown version": b"GIF90z" + FILES["gif"][6:],
    "gif: two frames": encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:2]),
    "webp: an empty file in it": b"RIFF" + struct.pack("<I", 4) + b"WEBP",
    "webp: a wave": FILES["webp"].replace(b"WEBP", b"WAVE"),
    "webp: a canvas of 2^24": b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack(
        "<II", 10, 0) + b"\xff" * 6,
    "webp: no key frame": FILES["webp"].replace(b"\x9d\x01\x2a", b"\x9d\x01\x2b"),
    "webp: two frames": encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:2]),
    "avif by its first bytes": b"\0\0\0\x1cftypavif" + bytes(80),
    "heic by its first bytes": b"\0\0\0\x18ftypheic" + bytes(80),
    "ico": encoded(LARGE, "ICO"), "ppm": encoded(LARGE, "PPM"), "tga": encoded(LARGE, "TGA"),
    "pcx": encoded(LARGE, "PCX"), "eps": encoded(LARGE, "EPS"), "pdf": encoded(LARGE, "PDF"),
    "dds": encoded(LARGE, "DDS"), "icns": encoded(LARGE, "ICNS"), "im": encoded(LARGE, "IM"),
    "jpeg 2000": encoded(LARGE, "JPEG2000"), "sgi": encoded(LARGE, "SGI"),
    "a page": b"<!doctype html><img src='http://10.0.0.1/a.png'>",
    "json": b'{"url": "file:///etc/passwd"}', "a zip file": b"PK\x03\x04" + bytes(60),
    "a video": b"\0\0\0\x20ftypisom" + bytes(80), "zeros": bytes(5000), "one byte": b"\x89",
}  # fmt: skip
BROKEN |= {
    f"{name}: its first {share} %": file[: len(file) * share // 100]
    for name, file in FILES.items()
    for share in (5, 40)
    # What there is of these is shown, as browsers do.
    if not (name == "progressive jpeg" and share == 40)
}


def ask(server: ServerProcess, *files: bytes, stream: bool = False) -> tuple[int, str]:
    """Status and message of a chat about these pictures."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What?"}]
    for file in files:
        url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "user", "content": parts}]
    body = {"messages": messages, "max_tokens": 1, "stream": stream}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, str(json.load(error)["error"]["message"])


def neighbour(server: ServerProcess) -> str:
    """What another client is streamed, of text alone."""
    body = {"prompt": "What is this?", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line for line in answer if line.startswith(b"data: {")]
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
    assert any(pieces)
    return "".join(pieces)


def num_bytes(server: ServerProcess) -> int:
    """Resident memory of the server and of all its processes."""
    found, left = 0, [server.process.pid]
    while left:
        pid = left.pop()
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                left += map(int, task.read_text().split())
            status = Path(f"/proc/{pid}/status").read_text()
            found += sum(1024 * int(size) for size in re.findall(r"VmRSS:\s*(\d+)", status))
    return found


def test_each_gets_a_400_that_names_it_and_the_next_request_works(server: ServerProcess) -> None:
    """Streamed or not; what a neighbour is streamed meanwhile is what it always is."""
    good = encoded(picture(60, 40, 1))
    assert len(BROKEN) >= 60 and ask(server, good)[0] == 200
    for file in BROKEN.values():  # once for what is made at first use
        ask(server, good, file)
    quiet, before, wrong = neighbour(server), num_bytes(server), {}
    with ThreadPoolExecutor(1) as beside:
        for number, (name, file) in enumerate(BROKEN.items()):
            streamed = beside.submit(neighbour, server)
            status, message = ask(server, good, file, stream=bool(number % 2))
            if status != 400 or not message.startswith("messages[0].content[2]: "):
                wrong[name] = status, message
            assert not any(w in message for w in ("PIL", "Traceback", "/work", "/tmp", "libjpeg"))
            assert streamed.result() == quiet
    assert not wrong
    assert ask(server, good)[0] == 200
    assert num_bytes(server) - before < 100 * 2**20


@pytest.mark.parametrize("count", [40, pytest.param(4000, marks=pytest.mark.slow)])
def test_bytes_that_are_changed_at_random(server: ServerProcess, count: int) -> None:
    """A picture or a reason, and nothing else."""
    draw = random.Random(5)
    kinds: list[Callable[[bytearray], object]] = [
        lambda file: file.__setitem__(draw.randrange(len(file)), draw.randrange(256)),
        lambda file: file.__setitem__(draw.randrange(min(64, len(file))), draw.randrange(256)),
        lambda file: file.__delitem__(draw.randrange(len(file))),
        lambda file: file.insert(draw.randrange(len(file)), draw.randrange(256)),
    ]
    before = num_bytes(server)
    for _ in range(count):
        file = bytearray(draw.choice(list(FILES.values())))
        for _ in range(draw.choice((1, 3, 30))):
            draw.choice(kinds)(file)
        status, message = ask(server, bytes(file))
        assert status == 200 or (status == 400 and message.startswith("messages[0].content[1]: "))
    assert ask(server, FILES["png"])[0] == 200
    assert num_bytes(server) - before < 100 * 2**20
