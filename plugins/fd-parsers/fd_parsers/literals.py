"""Arguments as models write them, turned into JSON piece by piece while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .scan import Reader, Steps

MAX_DEPTH = 100  # of brackets in arguments; programs that read deeper JSON may fail
MAX_ATOM_CHARS = 1000  # of a number or a word
_ATOM = re.compile(r"[^\s,:\[\]{}()\"'<]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]+")


class Malformed(Exception):
    """The text is not what it began as. What was read has been passed on."""


class Dialect(NamedTuple):
    """How a model writes values. `quotes` delimit strings, `words` are constants and their JSON,
    `escape` reads what follows a backslash."""

    quotes: tuple[str, ...]
    words: Mapping[str, str]
    escape: Callable[[Reader], Steps[str]] | None
    has_bare_words: bool = False  # keys and strings without quotes
    is_lenient: bool = False  # commas before a closing bracket


def quoted(text: str) -> str:
    """Text as the inside of a JSON string."""
    shown = json.dumps(text, ensure_ascii=False)[1:-1]
    try:
        shown.encode()
    except UnicodeEncodeError:
        return json.dumps(text)[1:-1]  # lone surrogates can only be sent escaped
    return shown


def _json_escape(reader: Reader) -> Steps[str]:
    """The escape as it stands, since it is JSON already."""
    kind = yield from reader.peek(1)
    text = (yield from reader.peek(5)) if kind == "u" else kind
    good = len(text) == 5 and _HEX.fullmatch(text, 1) if kind == "u" else kind in '"\\/bfnrt'
    if not kind or not good:
        raise Malformed
    reader.take(len(text))
    return "\\" + text


_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a",
                   "0": "\0", "\\": "\\", "'": "'", '"': '"', "\n": ""}  # fmt: skip
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}


def _python_escape(reader: Reader) -> Steps[str]:
    kind = yield from reader.peek(1)
    if not kind:
        raise Malformed
    if kind not in _NUM_DIGITS:
        reader.take(1)
        return quoted(_PYTHON_ESCAPES.get(kind, "\\" + kind))
    count = 1 + _NUM_DIGITS[kind]
    text = yield from reader.peek(count)
    if len(text) < count or not _HEX.fullmatch(text, 1) or int(text[1:], 16) > 0x10FFFF:
        raise Malformed
    reader.take(count)
    return quoted(chr(int(text[1:], 16)))


JSON = Dialect(('"',), {"true": "true", "false": "false", "null": "null"}, _json_escape)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", **JSON.words}
PYTHON = Dialect(('"', "'"), _PYTHON_WORDS, _python_escape, is_lenient=True)


class Literal:
    """Reads values of a dialect from `reader` and gives their JSON to `emit`."""

    def __init__(self, reader: Reader, emit: Callable[[str], object], dialect: Dialect) -> None:
        self._reader = reader
        self._emit = emit
        self._dialect = dialect

    def value(self, depth: int = 0) -> Steps[None]:
        """One value; Malformed if there is none, with text that is not understood left unread."""
        yield from self._reader.space()
        opening = yield from self._reader.char()
        if opening == "{":
            yield from self.object(depth)
        elif opening == "[":
            yield from self._items(depth)
        elif quote := (yield from self._reader.word(*self._dialect.quotes)):
            yield from self._string(quote)
        else:
            yield from self._atom()

    def object(self, depth: int = 0) -> Steps[None]:
        """An object with its braces."""
        yield from self._bracket("{", depth)
        yield from self.members("}", depth)
        self._emit("}")

    def members(self, close: str, depth: int = 0) -> Steps[None]:
        """Keys and values up to the closing bracket, which is taken."""
        first = True
        while True:
            yield from self._reader.space()
            if (first or self._dialect.is_lenient) and (yield from self._reader.word(close)):
                return
            if not first:
                self._emit(", ")
            first = False
            yield from self._key()
            yield from self.value(depth + 1)
            yield from self._reader.space()
            end = yield from self._reader.word(",", close)
            if end == close:
                return
            if not end:
                raise Malformed

    def _items(self, depth: int) -> Steps[None]:
        yield from self._bracket("[", depth)
        first = True
        while True:
            yield from self._reader.space()
            if (first or self._dialect.is_lenient) and (yield from self._reader.word("]")):
                break
            if not first:
                self._emit(", ")
            first = False
            yield from self.value(depth + 1)
            yield from self._reader.space()
            end = yield from self._reader.word(",", "]")
            if end == "]":
                break
            if not end:
                raise Malformed
        self._emit("]")

    def _bracket(self, opening: str, depth: int) -> Steps[None]:
        if depth >= MAX_DEPTH or not (yield from self._reader.word(opening)):
            raise Malformed
        self._emit(opening)

    def _key(self) -> Steps[None]:
        if quote := (yield from self._reader.word(*self._dialect.quotes)):
            yield from self._string(quote)
        else:
            name = yield from self._reader.run(_ATOM, MAX_ATOM_CHARS)
            if not self._dialect.has_bare_words or not name:
                raise Malformed
            self._reader.take(len(name))
            self._emit(f'"{quoted(name)}"')
        yield from self._reader.space()
        if not (yield from self._reader.word(":")):
            raise Malformed
        self._emit(": ")

    def _string(self, quote: str) -> Steps[None]:
        """The rest of a string, passed on while it arrives. Line breaks, which models write into
        strings, are escaped."""
        self._emit('"')
        escape = self._dialect.escape
        stops = (quote, "\\") if escape else (quote,)
        while True:
            stop = yield from self._reader.pass_until(lambda t: self._emit(quoted(t)), *stops)
            if stop == quote:
                self._emit('"')
                return
            if not stop or escape is None:
                raise Malformed
            try:
                self._emit((yield from escape(self._reader)))
            except Malformed:
                self._emit("\\")
                raise

    def _atom(self) -> Steps[None]:
        text = yield from self._reader.run(_ATOM, MAX_ATOM_CHARS)
        shown = text if _NUMBER.fullmatch(text) else self._dialect.words.get(text)
        if shown is None and self._dialect.has_bare_words and text:
            shown = f'"{quoted(text)}"'
        if shown is None:
            raise Malformed
        self._reader.take(len(text))
        self._emit(shown)
