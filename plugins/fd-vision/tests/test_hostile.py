"""What strangers send instead of pictures: each is refused with a reason; the next one works."""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fd_vision.sources as sources
import numpy as np
import pytest
import torch
from fd_vision.child import Answer, Job, prepare
from fd_vision.patches import WHITE, PatchRule, as_rgb, patches_of
from fd_vision.pool import SWITCH_S, DecodingPool
from fd_vision.processor import GridProcessor, KeptAnswers
from fd_vision.sources import fetch, read_source
from PIL import Image, ImageOps
from tiny import picture

from fastdeploy_core.contracts.model import MediaPart, MediaRules
from fastdeploy_core.errors import InvalidRequest

RULE = PatchRule(14, 2, 3136, 50176, (0.5,) * 3, (0.5,) * 3)
PLACE, VIDEO = 7, 8
NOTHING = MediaRules()


def encoded(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **more)
    return buffer.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, pixels: bytes, *extra: bytes) -> bytes:
    """A one-bit PNG whose header says this, whatever its pixels are."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *extra, chunk(b"IDAT", zlib.compress(pixels, 9))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


SPELLINGS = {
    "lines": lambda data: base64.encodebytes(data).decode(),
    "windows": lambda data: base64.encodebytes(data).decode().replace("\n", "\r\n"),
    "alphabet of urls": lambda data: base64.urlsafe_b64encode(data).decode(),
    "no padding": lambda data: base64.b64encode(data).decode().rstrip("="),
    "escaped": lambda data: quote(base64.b64encode(data).decode(), safe=""),
    "blanks around": lambda data: f" {base64.b64encode(data).decode()} ",
}
NO_BASE64 = ("A", "AAA=A", "AA===", "AAAA=", "AAA!", "AAé=", "=AAA", "A\0AA", "%ZZAA", "data:,AAAA")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_base64_is_read_as_clients_write_it(spelling: str) -> None:
    for size in (57, 58, 59, 1000):
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
        for head in ("data:image/png;base64", "DATA:;name=a.png;BASE64", "data:; base64"):
            url = f"{head},{SPELLINGS[spelling](data)}"
            assert read_source(url, "image", NOTHING).data == data
    frames = ",".join(SPELLINGS[spelling](bytes([n]) * 20) for n in range(3))
    video = read_source(f"data:video/jpeg;base64,{frames}", "video", NOTHING)
    assert video.data == b"\0" * 20 + b"\1" * 20 + b"\2" * 20 and video.lengths == (20,) * 3


@pytest.mark.parametrize("text", NO_BASE64)
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="not valid base64"):
        read_source(f"data:image/png;base64,{text}", "image", NOTHING)


def test_what_a_data_url_says_it_is() -> None:
    """Many clients only know that it is bytes; what it is shows in them."""
    data = encoded(picture(9, 9, 1))
    for kind in ("", "image/*", "image/jpg", "application/octet-stream"):
        assert read_source(f"  {url_of(data, kind)}\n", "image", NOTHING).data == data
    for kind in ("text/plain", "application/pdf", "video/mp4"):
        with pytest.raises(InvalidRequest, match=f"of {kind}; possible: image/"):
            read_source(url_of(data, kind), "image", NOTHING)


class Elsewhere:
    """As a tensor on a GPU."""

    def __array__(self, *_: Any) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


HELD = np.zeros((4, 8, 9, 3), np.uint8)
OBJECTS: dict[str, tuple[str, Any, str]] = {
    "a tensor": ("image", torch.zeros(8, 9, 3, dtype=torch.uint8), ""),
    "channels first": ("image", torch.zeros(3, 8, 9, dtype=torch.uint8), "height, width, 3"),
    "shares": ("image", np.zeros((8, 9, 3)), "uint8"),
    "vectors": ("image", torch.zeros(20, 64), "height, width, 3"),
    "vectors by name": ("image", {"image_embeds": torch.zeros(20, 64)}, "a dict is no picture"),
    "elsewhere": ("image", Elsewhere(), "host memory"),
    "frames": ("video", HELD, ""),
    "frames in a tensor": ("video", torch.tensor(HELD), ""),
    "a number": ("video", np.float32(3), "no video"),
    "with nothing said": ("video", (HELD, None), ""),
    "all that was said": (
        "video",
        (HELD, {"fps": 2, "total_num_frames": 4, "frames_indices": np.arange(4), "duration": 2.0}),
        "",
    ),
    "some of more": ("video", (HELD, {"fps": 30, "total_num_frames": 120}), "frames of more"),
    "chosen": ("video", (HELD, {"fps": 30, "frames_indices": [0, 9, 18, 27]}), "frames of more"),
    "one number": ("video", (HELD, {"frames_indices": 7}), "frames of more"),
    "no rate": ("video", (HELD, {"fps": "30"}), "fps='30'"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_programs_hold_is_taken_or_refused_by_name(name: str) -> None:
    kind, value, reason = OBJECTS[name]
    trusted = MediaRules(is_trusted=True)
    if not reason:
        source = read_source(value, kind, trusted)
        assert source.size == (9, 8) and len(source.data) % (9 * 8 * 3) == 0
        return
    with pytest.raises(InvalidRequest, match=reason):
        read_source(value, kind, trusted)


FRAMES = [picture(20, 20, n) for n in range(3)]
GOOD = encoded(picture(60, 40, 1))
SCANS = encoded(picture(90, 90, 1), "JPEG", progressive=True)
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no picture"),
    "text": (b"hello", "no picture"),
    "svg": (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
    "svg with space before": (b"\n\n  <SVG width='9'></SVG>", "SVG"),
    "a bomb": (png(13000, 13000, bytes(1626 * 13000)), "too large"),
    "a lying header, too large": (png(2**31 - 1, 2**31 - 1, b"\0\0"), "too large|damaged|no pic"),
    "a lying header": (png(5000, 5000, b"\0\0"), "damaged"),
    "a side of nothing": (png(0, 5, b"\0"), "damaged|no picture|too narrow"),
    "narrow": (encoded(Image.new("L", (201, 1))), "too narrow"),
    "truncated png": (GOOD[: len(GOOD) // 2], "damaged"),
    "truncated jpeg": (encoded(picture(90, 90, 1), "JPEG")[:400], "damaged|no picture"),
    "truncated webp": (encoded(picture(90, 90, 1), "WEBP")[:200], "damaged|no picture"),
    "only a signature": (b"\x89PNG\r\n\x1a\n", "no picture"),
    "a text bomb": (
        png(8, 8, bytes(16), chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(200 * 2**20), 9))),
        "damaged|memory|no picture",
    ),
    "a jpeg that passes over itself for long": (
        SCANS[:-2] + SCANS[SCANS.rindex(b"\xff\xda") : -2] * 50 + SCANS[-2:], "50 scans"
    ),
    "an animated gif": (
        encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "animated"
    ),
    "an animated webp": (
        encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "animated"
    ),
    "an animated png": (
        encoded(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), "animated"
    ),
    "tiff": (encoded(picture(20, 20, 1), "TIFF"), "no picture in a known format"),
    "jpeg 2000 by its signature": (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(64), "no picture"),
}  # fmt: skip


@pytest.fixture(scope="module")
def processor() -> Iterator[GridProcessor]:
    made = GridProcessor(NOTHING, RULE, None, {"image": PLACE, "video": VIDEO})
    yield made
    made.close()


def ask(processor: GridProcessor, *urls: Any) -> Any:
    parts = [MediaPart("image", url, f"part {n}") for n, url in enumerate(urls)]
    return processor.prepare([1, *[PLACE] * len(parts), 2], parts, "")[1]


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_picture_gets_a_reason_and_the_next_one_works(
    processor: GridProcessor, name: str
) -> None:
    data, reason = REFUSED[name]
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=reason) as caught:
        ask(processor, url_of(GOOD), url_of(data))
    assert time.monotonic() - began < 60
    assert caught.value.param == "part 1" and str(caught.value).startswith("part 1: ")
    assert not re.search(r"PIL|Traceback|/|0x[0-9a-f]{6}", str(caught.value))
    assert ask(processor, url_of(GOOD)) is not None
    assert processor._pool.num_deaths == 0


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64", "data:image/png,abc", "data:image/png;base64,*", "data:,",
        "data:text/html;base64,aGk=", "data:application/pdf;base64,aGk=", "", "cat.png",
        "/etc/passwd", "file:///etc/passwd", "file:/etc/passwd", "FILE:///etc/passwd",
        "ftp://host/a.png", "gopher://host/1", "javascript:1", "blob:x", "http:", "http://",
        "https://example.com/a.png", "http://127.0.0.1/a.png", "http://[::1]/a.png",
        "http://2130706433/", "http://0x7f.1/", "http://0177.0.0.1/", "http://[::ffff:127.0.0.1]/",
        "http://good.example@evil.example/", "http://good.example\\@evil.example/",
        "http://good.example#@evil.example/", "http://good.example?@evil.example/",
        "http://good.example%2eevil.example/", "http://good.example.evil.example/",
        "http://good.example\n.evil.example/", "http://good.example:x/", " http://good.example/",
        "http://good。example/", "//good.example/a.png", None, 5, b"bytes", ["a"], {"b": 1},
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_refused_before_anything_is_opened(
    monkeypatch: pytest.MonkeyPatch, url: Any
) -> None:
    def opened(*arguments: Any, **more: Any) -> None:
        raise AssertionError(f"opened {arguments}")

    monkeypatch.setattr(sources.socket, "create_connection", opened)
    monkeypatch.setattr(sources.socket, "getaddrinfo", opened)
    monkeypatch.setattr(sources.Path, "open", opened)
    with pytest.raises(InvalidRequest) as caught:
        read_source(url, "image", MediaRules(allowed_domains=("good.example",)))
    assert "passwd" not in str(caught.value)


def test_a_picture_that_is_too_large_is_refused_before_it_is_decoded() -> None:
    body = "A" * (sources.MAX_BYTES * 4 // 3 + 16)
    with pytest.raises(InvalidRequest, match="larger than 20 MiB"):
        read_source(f"data:image/png;base64,{body}", "image", NOTHING)


def test_pictures_of_a_request_share_a_limit(
    processor: GridProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fd_vision.processor.MAX_REQUEST_PIXELS", 60 * 40 + 100)
    with pytest.raises(InvalidRequest, match="in all"):
        ask(processor, url_of(GOOD), url_of(GOOD))


def test_numbers_of_pictures(processor: GridProcessor) -> None:
    with pytest.raises(InvalidRequest, match=r"9 pictures; at most 8"):
        ask(processor, *[url_of(GOOD)] * 9)
    strict = GridProcessor(MediaRules({"image": 0}), RULE, None, {"image": PLACE})
    with pytest.raises(InvalidRequest, match=r"1 pictures; at most 0"):
        ask(strict, url_of(GOOD))


@pytest.mark.parametrize(
    ("ids", "count"), [([PLACE], 0), ([1], 1), ([PLACE, PLACE], 1), ([PLACE], 2), ([VIDEO], 0)]
)
def test_every_placeholder_needs_its_picture(
    processor: GridProcessor, ids: list[int], count: int
) -> None:
    parts = [MediaPart("image", url_of(GOOD), "here")] * count
    with pytest.raises(InvalidRequest, match="spells a media token"):
        processor.prepare(ids, parts, "")


# -- files and hosts ------------------------------------------------------------------------------


def test_files_are_read_below_one_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "in-not"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a b.png").write_bytes(GOOD)
    (inside / "link.png").symlink_to(outside / "a b.png")
    os.mkfifo(inside / "pipe")
    rules = MediaRules(allowed_local_path=inside)
    assert read_source(f"file://{inside}/a%20b.png", "image", rules).data == GOOD
    for bad in (
        f"{outside}/a%20b.png", f"{inside}/../in-not/a%20b.png", f"{inside}/%2e%2e/in-not/a.png",
        f"{inside}/link.png", f"{inside}/none.png", f"{inside}", f"{inside}/pipe",
        f"{inside}/a%20b.png%00", f"host{inside}/a%20b.png", "/etc/passwd",
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as caught:
            read_source(f"file://{bad}", "image", rules)
        assert str(tmp_path) not in str(caught.value)
    with pytest.raises(InvalidRequest, match="--allowed-local-media-path"):
        read_source(f"file://{inside}/a%20b.png", "image", NOTHING)


class _Host(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/a.png")
            self.end_headers()
            return
        if self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.05)
            return
        self.send_response(200 if self.path in ("/a.png?x=1", "/endless") else 404)
        self.end_headers()
        body = GOOD
        if self.path == "/endless":
            body = bytes(sources.MAX_BYTES + 2**20)
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def host() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), _Host)
    server.seen = []  # type: ignore[attr-defined]
    server.handle_error = lambda *arguments: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_allowed_host_is_asked_once_and_not_followed(
    host: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = f"http://127.0.0.1:{host.server_port}"
    allowed = ("127.0.0.1",)  # a private address that the operator names by its number
    assert fetch(f"{base}/a.png?x=1", allowed) == GOOD
    for path, reason in (
        ("/moved", "redirects"), ("/none", "status 404"), ("/endless", "larger than 20 MiB")
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=reason):
            fetch(base + path, allowed)
    assert host.seen == ["/a.png?x=1", "/moved", "/none", "/endless"]  # type: ignore[attr-defined]
    monkeypatch.setattr(sources, "FETCH_LIMIT_S", 0.5)
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="could not be fetched"):
        fetch(f"{base}/slow", allowed)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.0.1", "0.0.0.0", "100.64.0.1", "::1",
     "fd00::1", "fe80::1%eth0", "::ffff:10.0.0.1", "224.0.0.1"],
)  # fmt: skip
def test_an_allowed_name_that_leads_to_a_private_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Of several addresses one is enough, and nothing is connected to."""
    found = [(2, 1, 6, "", ("93.184.216.34", 80)), (2, 1, 6, "", (address, 80))]
    monkeypatch.setattr(sources.socket, "getaddrinfo", lambda *a, **k: found)
    monkeypatch.setattr(
        sources.socket, "create_connection", lambda *a, **k: pytest.fail("connected")
    )
    with pytest.raises(InvalidRequest, match="private"):
        fetch("http://good.example/a.png", ("good.example",))


def test_the_connection_goes_to_the_address_that_was_checked(
    host: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads elsewhere the second time is not asked a second time."""
    asked: list[Any] = []

    def resolve(*arguments: Any, **more: Any) -> list[Any]:
        asked.append(arguments)
        return [(2, 1, 6, "", ("93.184.216.34", host.server_port))]

    def connected(address: Any, **more: Any) -> Any:
        assert address == ("93.184.216.34", host.server_port)
        made = socket.socket()
        made.connect(("127.0.0.1", host.server_port))
        return made

    monkeypatch.setattr(sources.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(sources.socket, "create_connection", connected)
    url = f"http://Good.Example:{host.server_port}/a.png?x=1"
    assert fetch(url, ("good.example",)) == GOOD
    assert len(asked) == 1


# -- modes ----------------------------------------------------------------------------------------


def decoded(data: bytes) -> np.ndarray:
    """What the child makes RGB of."""
    return np.asarray(as_rgb(Image.open(io.BytesIO(data))))


def test_modes_become_the_rgb_that_is_documented() -> None:
    base = picture(40, 28, 3)
    rgb = np.asarray(base)
    alpha = Image.fromarray(np.linspace(0, 255, 40 * 28).astype(np.uint8).reshape(28, 40))
    clear = base.copy()
    clear.putalpha(alpha)
    on_white = Image.alpha_composite(Image.new("RGBA", base.size, WHITE), clear).convert("RGB")
    assert (decoded(encoded(base)) == rgb).all()
    assert (decoded(encoded(clear)) == np.asarray(on_white)).all()
    assert (decoded(encoded(clear))[0, 0] == 255).all()  # wholly transparent
    grey = base.convert("L")
    for image in (grey, grey.convert("1")):
        assert (decoded(encoded(image)) == np.asarray(image.convert("RGB"))).all()
    deep = Image.fromarray((np.asarray(grey).astype(np.uint16) << 8) + 77)
    assert (decoded(encoded(deep)) == np.asarray(grey)[:, :, None]).all()
    palette = base.quantize(16)
    assert (decoded(encoded(palette)) == np.asarray(palette.convert("RGB"))).all()
    gone = decoded(encoded(palette, transparency=palette.getpixel((0, 0))))
    assert (gone[0, 0] == 255).all()
    luma = Image.merge("LA", (grey, alpha))
    assert (decoded(encoded(luma))[0, 0] == 255).all()
    cmyk = encoded(base.convert("CMYK"), "JPEG", quality=100, subsampling=0)
    assert np.abs(decoded(cmyk).astype(int) - rgb).mean() < 3
    with pytest.raises(InvalidRequest, match="floating-point"):
        as_rgb(Image.new("F", (4, 4)))


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_turns_a_picture_before_it_is_measured(turn: int) -> None:
    base = picture(120, 60, 3)
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(base, "PNG", exif=exif)
    opened = Image.open(io.BytesIO(data))
    answer = prepare(Job(source=data, rule=RULE, max_pixels=10**6, time_limit_s=5))
    upright = as_rgb(opened)
    assert upright.size == ((60, 120) if turn >= 5 else (120, 60))
    assert (
        answer.patches == patches_of(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), RULE)[0]
    )
    assert (answer.grid[1] > answer.grid[2]) == (turn >= 5)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # as in the processes that decode
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize("exif", [b"garbage!", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_metadata_that_cannot_be_read_turns_nothing(kind: str, exif: bytes) -> None:
    base = picture(60, 40, 3)
    assert (decoded(encoded(base, kind, exif=exif)) == decoded(encoded(base, kind))).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
def test_a_bitmap_is_the_picture_that_was_saved(mode: str) -> None:
    base = picture(61, 40, 3).convert(mode)
    assert (decoded(encoded(base, "BMP")) == decoded(encoded(base))).all()


def test_of_what_a_camera_keeps_in_a_jpeg_the_picture_is_shown() -> None:
    """A smaller picture, or a map of brightness, behind it: MPO."""
    base = picture(60, 40, 3)
    file = encoded(base, "MPO", save_all=True, append_images=[picture(30, 20, 4)])
    asked = Job(source=file, rule=RULE, max_pixels=10**6, time_limit_s=5)
    assert prepare(asked).patches == patches_of(as_rgb(Image.open(io.BytesIO(file))), RULE)[0]
    assert np.abs(decoded(file).astype(int) - np.asarray(base)).mean() < 9


# -- processes ------------------------------------------------------------------------------------


def job(**more: Any) -> Job:
    return Job(**{"source": GOOD, "rule": RULE, "max_pixels": 10**6, "time_limit_s": 10.0} | more)


def test_a_process_that_dies_or_hangs_is_replaced() -> None:
    pool = DecodingPool(1)
    try:
        wanted = pool.run(job()).patches
        pool._all[0].child.kill()
        pool._all[0].child.wait()
        assert pool.run(job()).patches == wanted
        os.kill(pool._all[0].child.pid, signal.SIGSTOP)
        with pytest.raises(InvalidRequest, match="too long"):
            pool.run(job(time_limit_s=0.5))
        assert pool.num_deaths == 1
        assert pool.run(job()).patches == wanted
    finally:
        pool.close()
    with pytest.raises(InvalidRequest, match="shutting down"):
        pool.run(job())


def test_a_process_may_start_for_longer_than_a_job_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a loaded machine it does."""
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(4)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    pool = DecodingPool(1)
    try:
        assert pool.run(job(time_limit_s=3.5)).patches
        assert pool.num_deaths == 0
    finally:
        pool.close()


def test_a_picture_that_comes_again_is_not_decoded_again() -> None:
    """Unless it, its preparation or its tenant is another one; what is kept has a limit."""
    processor = GridProcessor(NOTHING, RULE, None, {"image": PLACE})
    decode, seen = processor._decode, list[Any]()

    def counted(*given: Any) -> Answer:
        seen.append(given)
        return decode(*given)

    processor._decode = counted  # type: ignore[method-assign]

    def items(salt: str = "", **options: int) -> Any:
        part = MediaPart("image", url_of(encoded(image, "PNG")), "part", options)
        return processor.prepare([PLACE], [part], salt)[1].media

    try:
        image = Image.new("RGB", (60, 60), (9, 8, 7))
        first = items()
        assert items() == first and len(seen) == 1
        assert items("other")[0].digest != first[0].digest and len(seen) == 2
        assert items(max_pixels=RULE.max_pixels - 1) and len(seen) == 3
        processor._kept = KeptAnswers(2 * len(first[0].data))
        for shade in (1, 2, 3, 1, 3):  # the first left when the third came
            image = Image.new("RGB", (60, 60), (shade, 0, 0))
            assert items()
        assert len(seen) == 3 + 4 and processor._kept._num_bytes == 2 * len(first[0].data)
    finally:
        processor.close()


def test_a_server_starts_its_processes_before_the_first_picture() -> None:
    tokens = {"image": PLACE}
    server, program = (
        GridProcessor(MediaRules(is_trusted=trusted), RULE, None, tokens)
        for trusted in (False, True)
    )
    try:
        started = [place.child for place in server._pool._all]
        assert all(child is not None and child.poll() is None for child in started)
        assert not any(place.child for place in program._pool._all)
        for _ in range(3):
            ask(server, url_of(GOOD))
        assert [place.child for place in server._pool._all] == started
    finally:
        server.close()
        program.close()
    assert all(child is not None and child.poll() is not None for child in started)


def test_a_process_has_no_more_memory_than_it_may() -> None:
    pool = DecodingPool(1, memory_bytes=16 * 2**20)
    try:
        large = encoded(Image.new("RGB", (5000, 5000)), "PNG", compress_level=9)
        with pytest.raises(InvalidRequest, match=r"memory|too long"):
            pool.run(job(source=large, max_pixels=10**8))
        assert pool.run(job()).grid[0] == 1
    finally:
        pool.close()


def test_threads_switch_as_before_once_nobody_prepares(processor: GridProcessor) -> None:
    before, within = sys.getswitchinterval(), []

    class Seen(str):
        def lstrip(self, chars: str | None = None) -> str:
            within.append(sys.getswitchinterval())
            return super().lstrip(chars)

    for _ in range(2):
        with pytest.raises(InvalidRequest):
            ask(processor, Seen("data:image/png;base64,*"))
    assert within and set(within) == {SWITCH_S}
    assert sys.getswitchinterval() == before


def test_many_pictures_leave_nothing_behind(processor: GridProcessor) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    ask(processor, url_of(GOOD))
    before = descriptors()
    for seed in range(60):
        ask(processor, url_of(encoded(picture(60, 40, seed))))
    assert descriptors() <= before + 2
