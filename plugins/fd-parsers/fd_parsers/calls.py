"""The base of tool-call parsers: text passes, calls are taken out of it, arguments are passed on
while they arrive.

A call begins when its function's name is certain and arguments follow. Before that it may still be
plain text, and text that was sent to a client cannot be taken back. Once it has begun it stays a
call: if what follows is no JSON, the arguments carry it as it stands, so that nothing is lost and
the client can say what is wrong with it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from fastdeploy_core.contracts.small import ParsedDelta, ToolCallDelta

from .literals import JSON, Literal, Malformed
from .scan import Reader, Steps, chunks, merge

MAX_NAME_CHARS = 256
_NAME = re.compile(r"[^\s<>{}()\[\]\"'\\]+")
_KEYS = {"name", "arguments", "parameters", "id", "type", "index"}
_CLOSERS = re.compile(r"[\s}\]`]*")


class ToolCallStream:
    """Subclasses name markers and read a call after a start marker in `call`."""

    markers: ClassVar[tuple[str, ...]]  # special tokens that the parser reads
    starts: ClassVar[tuple[str, ...]]  # what may begin a call
    silent: ClassVar[tuple[str, ...]] = ()  # markers around a group of calls: not shown
    name_key: ClassVar[str] = "name"  # of a call that is one JSON object
    other_keys: ClassVar[tuple[str, ...]] = ("id", "type")  # may stand before its arguments

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.reader = Reader()
        self.parameters = {name: given for name, given in map(_function, tools) if name}
        self._delta = ParsedDelta()
        self._space: list[str] = []  # white space that is dropped if a call follows
        self._shown = False  # whether any text was shown
        self.num_calls = 0
        self._ids: set[str] = set()
        self.only_known = False  # whether a name has to be one of the request's functions
        self._run = self._main()
        next(self._run)  # to where it waits for text

    def push(self, text: str) -> ParsedDelta:
        """Add newly generated text, without thinking."""
        return merge([self._step(chunk) for chunk in chunks(text)])

    def finish(self) -> ParsedDelta:
        """The text has ended: a call that has not begun is plain text after all."""
        self.reader.end()
        delta = self._step("")
        if self.num_calls == 0:
            delta.content += "".join(self._space)
        self._space = []
        return delta

    def call(self, start: str) -> Steps[None]:
        """Read a call whose start marker has been taken: `begin`, then `arguments`; or `refuse`."""
        raise NotImplementedError

    def main(self) -> Steps[None]:
        """Read a whole answer."""
        while start := (yield from self.reader.pass_until(self.show, *self.starts, *self.silent)):
            if start not in self.silent:
                self.reader.hold(len(start))
                yield from self.call(start)

    # What subclasses say.

    def begin(self, name: str, call_id: str = "") -> None:
        """A call begins here for certain."""
        self.reader.release()
        self._space = []
        if not call_id or call_id in self._ids:  # models repeat themselves
            call_id = self.new_id()
        self._ids.add(call_id)
        self._delta.tool_calls.append(ToolCallDelta(self.num_calls, call_id, name))
        self.num_calls += 1

    def arguments(self, piece: str) -> None:
        """Some of the arguments of the call that has begun last."""
        index, calls = self.num_calls - 1, self._delta.tool_calls
        if not calls:
            calls.append(ToolCallDelta(index))
        calls[-1].arguments += piece

    def refuse(self) -> None:
        """What was read since the start marker is no call but text."""
        self.show(self.reader.release())

    def show(self, text: str) -> None:
        """Show text; white space at its end waits for the next text and is dropped if that is a
        call."""
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return
        if self._shown or self.num_calls == 0:
            self._delta.content += "".join(self._space) + body
        else:
            self._delta.content += body.lstrip()  # the first text after a call
        self._shown = True
        self._space = [text[len(body) :]]

    def new_id(self) -> str:
        """An id for a call."""
        return f"chatcmpl-tool-{uuid.uuid4().hex}"

    # What subclasses read.

    def json_arguments(self, *ends: str) -> Steps[str | None]:
        """An object of JSON, passed on as arguments. None, or where it is malformed what ended it:
        one of `ends`, up to which all is passed on as it stands, or "" at the end of the text."""
        reading = Literal(self.reader, self.arguments, JSON).object()
        return (yield from self.read_arguments(reading, *ends))

    def read_arguments(self, reading: Steps[None], *ends: str) -> Steps[str | None]:
        """The same for arguments that `reading` reads."""
        try:
            yield from reading
        except Malformed:
            return (yield from self.reader.pass_until(self.arguments, *ends))
        return None

    def json_call(self, *ends: str) -> Steps[str | None]:
        """One {"name": ..., "arguments": {...}}. None if it was read to its last brace; what ended
        it where its arguments are malformed, as in json_arguments; `refused` if it is no call: then
        it is held."""
        name = yield from self._head()
        if not name:
            return REFUSED
        if (yield from self.reader.char()) != "{":  # a call without arguments
            self.begin(name)
            self.arguments("{}")
            yield from self.reader.word("}")
            return None
        self.begin(name)
        end = yield from self.json_arguments(*ends)
        if end is None:
            yield from self._other_members()
        return end

    def json_calls(self, *ends: str) -> Steps[str | None]:
        """The same for one call or a list of calls in brackets."""
        reader = self.reader
        yield from reader.space()
        is_list = yield from reader.word("[")
        while True:
            yield from reader.space()
            end = yield from self.json_call(*ends)
            if not is_list or end is not None:
                return end
            yield from reader.space()
            if not (yield from reader.word(",")):
                yield from reader.word("]")
                return None
            reader.hold()

    def tail(self, *ends: str) -> Steps[None]:
        """Skip what closes a call, up to one of `ends` or the next start; other text is shown."""
        found: list[str] = []
        end = yield from self.reader.pass_until(found.append, *ends, *self.starts)
        text = "".join(found)
        if not _CLOSERS.fullmatch(text):
            self.show(text)
        if end in self.starts:
            self.reader.back(len(end))

    def _other_members(self) -> Steps[None]:
        """What follows the arguments in a call, up to its last brace: an id, which has come too
        late."""
        found: list[str] = []
        yield from self.reader.space()
        if (yield from self.reader.word(",", "}")) == ",":
            try:
                yield from Literal(self.reader, found.append, JSON).members("}")
            except Malformed:
                self.show("," + "".join(found))

    def _head(self) -> Steps[str]:
        """{"name": NAME, "arguments": up to the opening brace; or the whole up to the closing one
        for a call without arguments. Empty if something else stands here."""
        reader, name, opening = self.reader, "", "{"
        while True:
            yield from reader.space()
            if not (yield from reader.word(opening)):
                return ""
            yield from reader.space()
            key = yield from self._short_string()
            yield from reader.space()
            if not (yield from reader.word(":")):
                return ""
            yield from reader.space()
            if key in ("arguments", "parameters"):
                return name if (yield from reader.char()) == "{" else ""
            value = yield from self._short_string()
            if key == self.name_key:
                name = self.name(value)
            elif key not in self.other_keys:
                return ""
            yield from reader.space()
            if (yield from reader.char()) == "}":
                return name
            opening = ","

    def _short_string(self) -> Steps[str]:
        if not (yield from self.reader.word('"')):
            return ""
        text, stop = yield from self.reader.until('"', "<", limit=MAX_NAME_CHARS)
        if stop == "<":  # a marker may begin here
            self.reader.back(len(text) + 1)
            return ""
        return text

    def name(self, text: str) -> str:
        """The name of a function that a call names; empty if it cannot be one."""
        name = checked_name(text)
        return "" if self.only_known and name not in self.parameters else name

    def _main(self) -> Steps[None]:
        yield  # until text arrives
        yield from self.main()

    def _step(self, text: str) -> ParsedDelta:
        self.reader.add(text)
        next(self._run, None)
        delta, self._delta = self._delta, ParsedDelta()
        return delta


class LeadingCallStream(ToolCallStream):
    """Calls may also begin an answer without a marker, if they name functions of the request."""

    opening: ClassVar[str]  # the first character of such a call

    def main(self) -> Steps[None]:
        self.show((yield from self.reader.space()))
        if (yield from self.reader.char()) == self.opening:
            self.only_known = True
            self.reader.hold()
            yield from self.call("")
            self.only_known = False
        yield from super().main()


REFUSED = "refused"


def _function(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and schemas of parameters, of what clients send as a tool."""
    function = tool.get("function")
    function = function if isinstance(function, Mapping) else tool
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    name = function.get("name")
    return name if isinstance(name, str) else "", properties if isinstance(
        properties, Mapping
    ) else {}


def checked_name(name: str) -> str:
    """A function's name in a form that clients can send back; empty if it is none."""
    fits = 0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and _NAME.fullmatch(name)
    return name if fits else ""


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)  # NaN and Infinity are no JSON


def load_json(text: str) -> Any:
    """Strict JSON, except that strings may contain line breaks, which models write; else
    Malformed."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed from error


def dump_json(value: Any) -> str:
    """JSON that can be sent; Malformed if it nests too deeply."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)  # lone surrogates can only be sent escaped
    except RecursionError as error:
        raise Malformed from error
    return text


def whole_call(value: Any) -> tuple[str, str]:
    """Name and arguments of {"name": ..., "arguments": {...}}; some models write the arguments as
    JSON in a string, or leave them out. Malformed for anything else."""
    if not isinstance(value, Mapping) or not set(value) <= _KEYS:
        raise Malformed
    name = value.get("name")
    if not isinstance(name, str) or not checked_name(name):
        raise Malformed
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = load_json(arguments) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise Malformed
    return name, dump_json(arguments)
