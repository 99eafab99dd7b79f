"""From what a request names to bytes: data: URLs; http(s) from hosts that the operator allows;
files below a folder that the operator allows.

One parser reads a URL for the check and for the fetch; a host is resolved once, and the connection
goes to the address that was checked; redirects are not followed.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import math
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image

from fastdeploy_core.contracts.model import MediaRules
from fastdeploy_core.errors import InvalidRequest

from .patches import as_rgb

MAX_BYTES = 20 * 2**20  # of one picture or video as it comes
MAX_GIVEN_FRAMES = 768  # of a video whose frames are given one by one
FETCH_LIMIT_S = 10.0  # for all of a fetch
CHUNK_BYTES = 64 * 1024
UNKNOWN_TYPE = "application/octet-stream"  # what clients say of a file whose name says nothing
_STANDARD = bytes.maketrans(b"-_", b"+/")
# A URL has no others; an unusual character is where two parsers differ.
_URL = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+(/[A-Za-z0-9\-._~!$&'()*+,;=:@%/?]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Source:
    """A picture or video as it comes: a file's bytes, or RGB pixels with their width and height.
    A video may also be several frames, one after the other."""

    data: bytes
    size: tuple[int, int] | None = None
    lengths: tuple[int, ...] = ()  # of each frame's file; a video of pixels has none
    fps: float = 0.0  # of a video's frames; 0: not said


def read_source(value: Any, kind: str, rules: MediaRules) -> Source:
    """The bytes that a part of this kind ("image" or "video") stands for; InvalidRequest if it is
    malformed or not allowed."""
    word = _word(kind)
    if isinstance(value, str):
        if value.lstrip()[:5].lower() == "data:":
            return _from_data(value.strip(), kind)
        scheme = value[:8].partition(":")[0].lower()
        if scheme in ("http", "https"):
            return Source(fetch(value, rules.allowed_domains, kind))
        if scheme == "file":
            return Source(_from_file(value, rules))
        if rules.is_trusted:
            return Source(_read(Path(value)))
        raise InvalidRequest(
            f"a {word} is named by a data: URL, or http(s): or file: where the operator allows it"
        )
    if rules.is_trusted:
        return _from_object(value) if kind == "image" else _video_from_object(value)
    example = "data:image/png;base64,..." if kind == "image" else "data:video/mp4;base64,..."
    raise InvalidRequest(f'a {word} is given as {{"url": "{example}"}}')


def _word(kind: str) -> str:
    return "picture" if kind == "image" else "video"


def _from_data(url: str, kind: str) -> Source:
    head, comma, body = url.partition(",")
    head = head.lower().replace(" ", "")  # browsers allow them before "base64"
    if not comma or not head.endswith(";base64"):
        raise InvalidRequest(f"a data: URL of a {_word(kind)} reads data:{kind}/...;base64,...")
    given = head[5:].partition(";")[0]
    if given not in ("", UNKNOWN_TYPE) and not given.startswith(f"{kind}/"):
        raise InvalidRequest(f"the data: URL is of {given:.40}; possible: {kind}/...")
    if len(body) * 3 // 4 > MAX_BYTES + 2:
        raise InvalidRequest(_too_large())
    # Frames of a video one by one, as vLLM's clients send them.
    is_list = given == "video/jpeg"
    if is_list and body.count(",") >= MAX_GIVEN_FRAMES:
        raise InvalidRequest(f"a video has at most {MAX_GIVEN_FRAMES} frames")
    try:
        files = [_from_base64(part) for part in (body.split(",") if is_list else [body])]
    except (binascii.Error, ValueError):
        raise InvalidRequest("the data: URL is not valid base64") from None
    return Source(b"".join(files), lengths=tuple(map(len, files)) if is_list else ())


def _from_base64(text: str) -> bytes:
    """As browsers read it (https://infra.spec.whatwg.org/#forgiving-base64): with line breaks, with
    or without the = at its end; in the alphabet of URLs, too. ValueError for anything else."""
    if "%" in text:
        text = unquote(text)
    found = text.encode("ascii").translate(_STANDARD, b" \t\n\f\r")
    if len(found) % 4 == 0:
        found = found.removesuffix(b"=").removesuffix(b"=")
    if b"=" in found:
        raise ValueError("= is not at the end")
    return base64.b64decode(found + b"=" * (-len(found) % 4), validate=True)


def _from_file(url: str, rules: MediaRules) -> bytes:
    refusal = InvalidRequest(
        "file: is read only below the folder that the operator allows (--allowed-local-media-path)"
    )
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise refusal
    path = Path(unquote(parts.path))
    if rules.is_trusted:
        return _read(path)
    if rules.allowed_local_path is None or "\0" in str(path):
        raise refusal
    try:
        # Links are followed before the check, and what is read is what was checked.
        found = path.resolve(strict=True)
    except (OSError, RuntimeError):
        raise refusal from None
    if not found.is_relative_to(rules.allowed_local_path.resolve()):
        raise refusal
    return _read(found)


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise InvalidRequest("there is no such picture file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError:
        raise InvalidRequest("the picture file cannot be read") from None
    if len(data) > MAX_BYTES:
        raise InvalidRequest(_too_large())
    return data


def _from_object(value: Any) -> Source:
    """Of a program that holds an LLM."""
    if isinstance(value, bytes | bytearray):
        return Source(bytes(value))
    if isinstance(value, Path):
        return Source(_read(value))
    if _is_array(value):
        value = _as_array(value)
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3:
            raise InvalidRequest(
                f"an array of {value.dtype} {list(value.shape)} is no picture; possible: uint8 "
                "[height, width, 3]"
            )
        return Source(value.tobytes(), (value.shape[1], value.shape[0]))
    if isinstance(value, Image.Image):
        rgb = as_rgb(value)
        return Source(rgb.tobytes(), rgb.size)
    raise InvalidRequest(
        f"a {type(value).__name__} is no picture; possible: a Pillow image, an array [height, "
        "width, 3] of uint8, bytes of a file, a path, a URL"
    )


def _is_array(value: Any) -> bool:
    """NumPy's arrays, and the tensors of other libraries."""
    return hasattr(value, "__array__") and not isinstance(value, Image.Image)


def _as_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except (TypeError, RuntimeError) as error:
        raise InvalidRequest(f"the {type(value).__name__} is not in host memory: {error}") from None


def _video_from_object(value: Any) -> Source:
    """Of a program that holds an LLM: frames, or (frames, {"fps": 2.0})."""
    fps, said = 0.0, dict[str, Any]()
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping | None):
        value, said = value[0], dict(value[1] or {})
        fps = said.get("fps") or 0.0
    if not isinstance(fps, int | float) or not 0 <= fps < math.inf:
        raise InvalidRequest(f"a video has fps={fps!r}; possible: a number above 0")
    if isinstance(value, bytes | bytearray | Path):
        return _from_object(value)
    frames = value if isinstance(value, list | tuple) else ()
    if _is_array(value):
        array = _as_array(value)
        frames = list(array) if array.ndim else []
    if not 0 < len(frames) <= MAX_GIVEN_FRAMES:
        raise InvalidRequest(
            f"a {type(value).__name__} is no video; possible: an array [frames, height, width, 3] "
            f"of uint8, a list of up to {MAX_GIVEN_FRAMES} pictures of one size, either in a pair "
            'with {"fps": number}, bytes of a file, a path, a URL'
        )
    whole = list(range(count := len(frames)))
    numbers = said.get("frames_indices")
    numbers = whole if numbers is None else np.ravel(numbers).tolist()
    if said.get("total_num_frames") not in (None, count) or numbers != whole:
        raise InvalidRequest(
            f"a video is given as {count} frames of more (total_num_frames, frames_indices); "
            "possible: fps of the frames that are given, or all of them and num_frames in "
            "mm_processor_kwargs"
        )
    made = [_from_object(frame) for frame in frames]
    if made[0].size is None or any(frame.size != made[0].size for frame in made):
        raise InvalidRequest("the frames of a video are pictures or arrays of one size")
    return Source(b"".join(frame.data for frame in made), made[0].size, fps=float(fps))


def _too_large() -> str:
    return f"it is larger than {MAX_BYTES // 2**20} MiB"


# -- http(s) --------------------------------------------------------------------------------------


def fetch(url: str, allowed_domains: tuple[str, ...], kind: str = "image") -> bytes:
    """The body behind a URL; InvalidRequest unless its host is allowed and answers with a file that
    is not too large, in time."""
    deadline = time.monotonic() + FETCH_LIMIT_S
    if not _URL.fullmatch(url):
        raise InvalidRequest("the URL has characters that are not taken in one")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise InvalidRequest("the URL is malformed") from None
    allowed = {domain.lower().rstrip(".") for domain in allowed_domains}
    if host not in allowed:
        possible = ", ".join(sorted(allowed)) or "none (--allowed-media-domains)"
        raise InvalidRequest(f"pictures are not fetched from this host; possible: {possible}")
    is_secure = parts.scheme == "https"
    target = parts.path or "/"
    target += f"?{parts.query}" if parts.query else ""
    try:
        address = _address(host, port or (443 if is_secure else 80))
        return _get(host, address, target, deadline, kind, is_secure=is_secure)
    except (OSError, http.client.HTTPException):
        raise InvalidRequest("it could not be fetched") from None


def _address(host: str, port: int) -> tuple[str, int]:
    """Where to connect. Private addresses are refused, whatever name leads there; one that the
    operator allows by its number is not."""
    try:
        return str(ipaddress.ip_address(host)), port
    except ValueError:
        pass
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    for address in addresses:
        inner = getattr(address, "ipv4_mapped", None) or address
        if not inner.is_global or inner.is_multicast:
            raise InvalidRequest("pictures are not fetched from private addresses")
    return str(addresses[0]), port


def _get(
    host: str, address: tuple[str, int], target: str, deadline: float, kind: str, *, is_secure: bool
) -> bytes:
    connection = http.client.HTTPConnection(host, address[1], timeout=FETCH_LIMIT_S)
    raw = socket.create_connection(address, timeout=_left(deadline))
    try:
        if is_secure:
            raw = ssl.create_default_context().wrap_socket(raw, server_hostname=host)
        connection.sock = raw
        connection.request(
            "GET", target, headers={"Accept": f"{kind}/*", "User-Agent": "fastdeploy"}
        )
        answer = connection.getresponse()
        if 300 <= answer.status < 400:
            raise InvalidRequest("the picture's host redirects, which is not followed")
        if answer.status != 200:
            raise InvalidRequest(f"the picture's host answers with status {answer.status}")
        body = bytearray()
        while True:
            raw.settimeout(_left(deadline))
            piece = answer.read1(CHUNK_BYTES)
            if not piece:
                return bytes(body)
            body += piece
            if len(body) > MAX_BYTES:
                raise InvalidRequest(_too_large())
    finally:
        raw.close()
        connection.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
