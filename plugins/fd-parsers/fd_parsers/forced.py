"""Tool calls that a grammar forces: tool_choice `required` or a named function.

The answer of a named function is its arguments; a required call is a JSON array of {"name",
"parameters"}. The scanner passes arguments on character by character while they arrive, so a stream
shows them as they are written and ends with the same text as a whole answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from fastdeploy_core.contracts.small import ParsedDelta, ToolCallDelta
from fastdeploy_core.types import StructuredOutputsParams

MAX_FORCED_CALLS = 16  # ends the answer of a model that would go on calling
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def constraint(
    tools: Sequence[dict[str, Any]], name: str | None, many: bool
) -> StructuredOutputsParams:
    """The grammar for a named function (`name`) or for at least one call of any."""
    functions = {tool["function"]["name"]: _parameters(tool) for tool in tools}
    if name is not None:
        return StructuredOutputsParams(json=functions[name])
    items = [
        {
            "type": "object",
            "properties": {"name": {"const": function}, "parameters": {"$ref": _place(function)}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    most = MAX_FORCED_CALLS if many else 1
    array = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": items}}
    # Each tool's schema is whole at a place of its own: tools may define one name differently.
    array["$defs"] = {name: _moved(schema, _place(name)) for name, schema in functions.items()}
    return StructuredOutputsParams(json=array)


def _place(function: str) -> str:
    return f"#/$defs/{function}"


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references as they are when its root is at `place`."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:].rstrip("/")
    return moved


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or _ANY_OBJECT


def reader(
    name: str | None, required: bool
) -> Callable[[list[Any]], NamedCall | RequiredCalls] | None:
    """The reader of the answer to a forced choice; None if no choice is forced."""
    if name is not None:
        return lambda tools: NamedCall(name)
    return (lambda tools: RequiredCalls()) if required else None


class ForcedTools:
    """Part `forced-tools`: what the server asks of this file."""

    constraint = staticmethod(constraint)
    reader = staticmethod(reader)


class NamedCall:
    """All text of the answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> ParsedDelta:
        """New text."""
        if not text:
            return ParsedDelta()
        call = ToolCallDelta(index=0, name=self._name, arguments=text)
        self._name = None
        return ParsedDelta(tool_calls=[call])

    def finish(self) -> ParsedDelta:
        """The text has ended."""
        return ParsedDelta()


class RequiredCalls:
    """An array of calls, passed on while it arrives."""

    def __init__(self) -> None:
        self._depth = 0  # of brackets: a call is at 2, its parameters at 3 and deeper
        self._in_string = False
        self._escaped = False
        self._string: list[str] = []  # the string being read, quotes included
        self._key: str | None = None  # key of the value that comes next, at depth 2
        self._index = -1
        self._in_parameters = False
        self._calls: list[ToolCallDelta] = []

    def push(self, text: str) -> ParsedDelta:
        """New text."""
        self._calls = []
        for char in text:
            self._take(char)
        return ParsedDelta(tool_calls=self._calls)

    def finish(self) -> ParsedDelta:
        """The text has ended; a call that was cut off stays incomplete."""
        return ParsedDelta()

    def _take(self, char: str) -> None:
        if self._in_parameters:
            self._argument(char)
        if self._in_string:
            self._inside_string(char)
        elif char == '"':
            self._in_string, self._string = True, [char]
        elif char in "[{":
            self._open(char)
        elif char in "]}":
            self._depth -= 1
            if self._depth == 2:
                self._in_parameters = False
                self._key = None

    def _open(self, char: str) -> None:
        self._depth += 1
        if self._depth == 2:
            self._index += 1
            self._key = None
        elif self._depth == 3 and self._key == "parameters" and not self._in_parameters:
            self._in_parameters = True
            self._argument(char)

    def _inside_string(self, char: str) -> None:
        self._string.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 2:
                self._whole_string("".join(self._string))

    def _whole_string(self, literal: str) -> None:
        """A key or the name, at the level of a call."""
        text = json.loads(literal)
        if self._key == "name":
            self._calls.append(ToolCallDelta(index=self._index, name=text))
            self._key = None
        elif self._key is None:
            self._key = text

    def _argument(self, char: str) -> None:
        if self._calls and self._calls[-1].index == self._index:
            self._calls[-1].arguments += char
        else:
            self._calls.append(ToolCallDelta(index=self._index, arguments=char))
