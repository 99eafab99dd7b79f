"""Tool calls between a start and an end marker, with JSON somewhere inside.

A call is returned as a whole, once its end marker has arrived and its JSON is valid. Before that it
may still be plain text, and text sent to a client cannot be taken back. The end marker does not
count inside a JSON string, so arguments may contain it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from fastdeploy_core.contracts.small import ParsedDelta, ToolCallDelta

from .scan import MarkerScanner, chunks, merge

# A call whose quotes do not balance hides its end marker. At the end of the text the marker is
# searched again without regard to quotes. Each such repair rereads the rest, hence the limit.
MAX_REPAIRS = 8


class MalformedCall(Exception):
    """The text between the markers is no tool call."""


class _Body:
    """The text of one call so far, scanned for an end marker outside JSON strings."""

    __slots__ = ("_end", "_outside", "_pending", "_quoted", "_scanned")

    _inside = re.compile(r'\\.|"', re.DOTALL)

    def __init__(self, end: str) -> None:
        self._end = end
        self._outside = re.compile(f'"|{re.escape(end)}')
        self._scanned: list[str] = []
        self._pending = ""  # may be the beginning of a marker
        self._quoted = False

    def push(self, text: str) -> str | None:
        """Add text; returns the text after the end marker, once that has arrived."""
        text = self._pending + text
        position = 0
        while True:
            match = (self._inside if self._quoted else self._outside).search(text, position)
            if match is None:
                break
            position = match.end()
            if match.group() == self._end:
                self._scanned.append(text[: match.start()])
                self._pending = ""
                return text[position:]
            if match.group() == '"':
                self._quoted = not self._quoted
        keep = self._certain_end(text, position)
        self._scanned.append(text[:keep])
        self._pending = text[keep:]
        return None

    def text(self) -> str:
        """Everything between the markers so far."""
        return "".join(self._scanned) + self._pending

    def _certain_end(self, text: str, start: int) -> int:
        if self._quoted:
            return len(text) - 1 if text.endswith("\\") and start < len(text) else len(text)
        for length in range(min(len(self._end) - 1, len(text) - start), 0, -1):
            if text.endswith(self._end[:length]):
                return len(text) - length
        return len(text)


class TaggedToolParser:
    """Base of the parsers; subclasses name the markers and read the text between them."""

    markers: ClassVar[tuple[str, ...]]  # all markers, for the detokenizer
    start: ClassVar[str]
    end: ClassVar[str]
    silent: ClassVar[tuple[str, ...]] = ()  # markers around a group of calls: not shown

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._scanner = MarkerScanner((self.start, *self.silent))
        self._body: _Body | None = None
        self._space: list[str] = []  # white space that is dropped if a call follows
        self._shown = False  # whether any text was shown
        self._num_calls = 0
        self._repairs = 0

    def read(self, body: str) -> list[tuple[str, Any]]:
        """(name, arguments) of the calls in the text between markers; MalformedCall if it holds
        none."""
        raise NotImplementedError

    def push(self, text: str) -> ParsedDelta:
        """Add newly generated text, without thinking."""
        return merge([self._push(chunk) for chunk in chunks(text)])

    def _push(self, text: str) -> ParsedDelta:
        delta = ParsedDelta()
        self._take(text, delta)
        return delta

    def finish(self) -> ParsedDelta:
        """The text has ended: an unfinished call is plain text after all."""
        deltas: list[ParsedDelta] = []
        while self._body is not None:
            raw, self._body = self._body.text(), None
            body, marker, rest = raw.partition(self.end)
            delta = ParsedDelta()
            deltas.append(delta)
            if not marker:
                self._close(raw, delta, "")  # some models end the text with the call's last brace
                break
            if self._repairs == MAX_REPAIRS:
                self._show(self.start + raw, delta)
                break
            self._repairs += 1
            self._close(body, delta, self.end)
            deltas.append(self.push(rest))
        delta = ParsedDelta()
        self._show(self._scanner.finish(), delta)
        if self._num_calls == 0:
            delta.content += "".join(self._space)
        self._space = []
        return merge([*deltas, delta])

    def _take(self, text: str, delta: ParsedDelta) -> None:
        while text:
            if self._body is not None:
                rest = self._body.push(text)
                if rest is None:
                    return
                body, self._body = self._body, None
                self._close(body.text(), delta, self.end)
                text = rest
                continue
            text = self._outside(text, delta)

    def _outside(self, text: str, delta: ParsedDelta) -> str:
        """Show text until a call begins; returns the text after the start marker."""
        rest = ""
        for is_marker, piece in self._scanner.push(text):
            if self._body is not None:
                rest += piece
            elif not is_marker:
                self._show(piece, delta)
            elif piece == self.start:
                self._body = _Body(self.end)
        if self._body is not None:
            rest += self._scanner.finish()
        return rest

    def _close(self, body: str, delta: ParsedDelta, end: str) -> None:
        try:
            calls = [(name, _dump(arguments)) for name, arguments in self.read(body)]
        except MalformedCall:
            self._show(self.start + body + end, delta)
            return
        self._space = []
        for name, arguments in calls:
            call_id = f"chatcmpl-tool-{uuid.uuid4().hex}"
            delta.tool_calls.append(ToolCallDelta(self._num_calls, call_id, name, arguments))
            self._num_calls += 1

    def _show(self, text: str, delta: ParsedDelta) -> None:
        """Show text; white space at its end waits for the next text and is dropped if that is a
        call."""
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return
        if self._shown or self._num_calls == 0:
            delta.content += "".join(self._space) + body
        else:
            delta.content += body.lstrip()  # the first text after a call
        self._shown = True
        self._space = [text[len(body) :]]


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)  # NaN and Infinity are no JSON


def load_json(text: str) -> Any:
    """Strict JSON, except that strings may contain line breaks, which models write; else
    MalformedCall."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedCall from error


def name_and_arguments(value: Any) -> tuple[str, Any]:
    """{"name": ..., "arguments": {...}}, as checked parts."""
    if not isinstance(value, Mapping):
        raise MalformedCall
    name = value.get("name")
    if not isinstance(name, str):
        raise MalformedCall
    return checked_name(name), checked_arguments(value.get("arguments", value.get("parameters")))


def checked_name(name: str) -> str:
    """A function's name in a form that clients can send back."""
    if not name or len(name) > 256 or not name.isprintable():
        raise MalformedCall
    return name


def checked_arguments(arguments: Any) -> Any:
    """Arguments are an object; some models write it as JSON in a string, or leave it out."""
    if isinstance(arguments, str):
        arguments = load_json(arguments) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise MalformedCall
    return arguments


def _dump(arguments: Any) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)  # lone surrogates can only be sent escaped
    except RecursionError as error:
        raise MalformedCall from error
    return text
