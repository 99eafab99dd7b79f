"""Strict JSON: refuses what Python's parser accepts and what would cause errors later.

NaN and Infinity, numbers beyond 64 bit or float range, duplicate keys, lone surrogates, NUL
characters, deep nesting and anything that is not UTF-8 are errors of the client.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from .errors import ApiError
from .threads import Threads

MAX_DEPTH = 96
# Counted before the parse, which would hold up the whole process and take memory for each.
MAX_KEYS = 2**16  # keys, lists and objects
MAX_VALUES = 2**18
MAX_INT_CHARS = 20  # sign and 19 digits hold every 64-bit number
BIG_BODY_BYTES = 64 * 1024  # bodies of more are parsed in a thread
PIECE_BYTES = 2**16
_SUSPECT_ESCAPE = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)")
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_SUSPECT_NUMBERS = b"0e", b"0" * 18  # after _DIGITS; all other numbers are within bounds

Model = TypeVar("Model", bound=BaseModel)


def tenant_of(request: Request) -> str:
    """Who calls: the name that the key stands for; empty without keys."""
    tenant: str = getattr(request.state, "tenant", "")
    return tenant


async def read_model(request: Request, model: type[Model], threads: Threads) -> Model:
    """The request's body as this model; else ApiError or pydantic's ValidationError."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415, f"the body must be application/json, got {media_type[:60] or 'no content type'}"
        )
    if request.headers.get("content-encoding", "").lower() not in ("", "identity"):
        raise ApiError(415, "the body must not be compressed; leave Content-Encoding out")
    raw = await request.body()
    request.state.num_body_bytes = len(raw)
    if len(raw) > BIG_BODY_BYTES:
        body, unknown = await threads.run(tenant_of(request), lambda: _to_model(raw, model))
    else:
        body, unknown = _to_model(raw, model)
    if unknown:
        request.state.ignored_fields = unknown  # Guard names them in a response header
    return body


def _to_model(raw: bytes, model: type[Model]) -> tuple[Model, list[str]]:
    """The body, and the names of its fields that have no effect here."""
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise ApiError(
            400, f"the body must be a JSON object, got {raw[:40].decode(errors='replace')}"
        )
    unknown = sorted(value.keys() - _known_fields(model))
    return model.model_validate(value), unknown


@functools.cache
def _known_fields(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(model.model_fields) | getattr(model, "also_known", frozenset())


def parse_json(raw: bytes) -> Any:
    """The value of a JSON document; ApiError 400 says what is wrong with it."""
    is_suspect, is_nested = _look(raw)
    try:
        value = (_CAREFUL if is_suspect else _PLAIN).decode(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not valid UTF-8") from error
    except RecursionError as error:
        raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    check_text = b"\\" in raw and _SUSPECT_ESCAPE.search(raw) is not None
    if check_text or is_nested:
        _check_tree(value, check_text)
    return value


def _look(raw: bytes) -> tuple[bool, bool]:
    """Whether numbers may be out of range, and whether lists and objects may be nested too deep;
    ApiError for more parts than a body may have."""
    is_suspect, last, num_open, num_keys, num_values = False, b"", 0, 0, 0
    for piece, num_quotes in _outside_texts(raw):
        num_open += piece.count(b"[") + piece.count(b"{")
        num_keys += piece.count(b":")
        num_values += piece.count(b",")
        most_quotes = 2 * (2 * MAX_KEYS + MAX_VALUES)
        if num_open + num_keys > MAX_KEYS or num_values >= MAX_VALUES or num_quotes > most_quotes:
            raise ApiError(
                400,
                f"the body has too many parts; at most {MAX_KEYS} keys, lists and objects and "
                f"{MAX_VALUES} values are possible; long texts are",
            )
        digits = (last + piece).translate(_DIGITS)  # a tenth of a regular expression's time
        is_suspect = is_suspect or any(number in digits for number in _SUSPECT_NUMBERS)
        last = piece[-18:]
    return is_suspect, num_open > MAX_DEPTH


def _outside_texts(raw: bytes) -> Iterator[tuple[bytes, int]]:
    """JSON without its texts, and the quotes so far, piece by piece: other threads have turns."""
    num_quotes = end = 0
    while piece := raw[end : end + PIECE_BYTES]:
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # an escape stays whole
            piece = raw[end : end + PIECE_BYTES + 1]
        end += len(piece)
        if b"\\" in piece:  # what is left of quotes ends texts
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[num_quotes % 2 :: 2])
        num_quotes += len(parts) - 1
        yield outside, num_quotes


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _parse_int(text: str) -> int:
    if len(text) <= MAX_INT_CHARS:
        number = int(text)
        if -(2**63) <= number < 2**63:
            return number
    raise ValueError(f"number {text[:24]} is beyond 64 bit")


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text[:24]} is out of range")
    return number


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise ValueError(f"key {twice[:60]!r} is given twice")
    return result


# Without a function for numbers, the C scanner parses them itself.
_PLAIN = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
_CAREFUL = json.JSONDecoder(
    parse_constant=_refuse_constant,
    parse_int=_parse_int,
    parse_float=_parse_float,
    object_pairs_hook=_without_duplicates,
)


def _check_tree(value: Any, check_text: bool) -> None:
    """Check the depth; with check_text also strings for characters that UTF-8 cannot encode."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += [*item.values(), *(item if check_text else ())]
            elif isinstance(item, list):
                below += item if check_text else [i for i in item if isinstance(i, dict | list)]
            elif check_text and isinstance(item, str):
                _check_text(item)
        if not below:
            return
        level = below
    raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels")


def _check_text(text: str) -> None:
    if "\0" in text:
        raise ApiError(400, "text must not contain NUL characters")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(400, "text must not contain lone surrogates") from error
