"""Tool calls whose arguments stand between tags of their own, as text: Qwen3-Coder, GLM, MiniMax,
Seed-OSS, DeepSeek V3.2.

A value's type is not written, so the function's schema decides: what can only be a string is
passed on while it arrives; other values when they are complete, as JSON if they are JSON.

Forms: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct, zai-org/GLM-4.5 and GLM-4.6,
MiniMaxAI/MiniMax-M2 and ByteDance-Seed/Seed-OSS-36B-Instruct; encoding/README.md of
deepseek-ai/DeepSeek-V3.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .calls import MAX_NAME_CHARS, ToolCallStream, dump_json, load_json
from .hermes import HermesToolParser
from .literals import Malformed, quoted
from .scan import Steps

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
          dict: "object", type(None): "null"}  # fmt: skip
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class TagToolParser(ToolCallStream):
    """Qwen3-Coder: <function=NAME><parameter=KEY>VALUE</parameter></function>, each call between
    <tool_call> and </tool_call>. Subclasses have other tags."""

    group, group_end = "<tool_call>", "</tool_call>"
    start, name_end, end = "<function=", ">", "</function>"
    key_start, key_end = "<parameter=", ">"
    value_start, value_end = "", "</parameter>"
    starts: ClassVar[tuple[str, ...]] = (group, start)
    silent: ClassVar[tuple[str, ...]] = (group_end,)
    markers: ClassVar[tuple[str, ...]] = (group, group_end)
    trims_lines: ClassVar[bool] = True  # the line breaks inside a value's tags belong to the tags

    def call(self, start: str) -> Steps[None]:
        name = yield from self._function(start)
        if not name:
            self.refuse()
            return
        self.begin(name)
        self.arguments("{")
        between: list[str] = []
        comma, is_whole = "", True
        stops = (self.key_start, self.end, self.group_end)
        while True:
            stop = yield from self.reader.pass_until(between.append, *stops)
            if stop != self.key_start:
                break
            self.arguments(comma)
            comma = ", "
            is_whole = yield from self._parameter(name)
        if stop and is_whole:
            self.arguments("}")
        text = "".join(between)
        if text.strip():
            self.show(text)

    def _function(self, start: str) -> Steps[str]:
        """The function's name after the start; empty if there is none."""
        if start == self.group:
            yield from self.reader.space()
            if not (yield from self.reader.word(self.start)):
                return ""
        text, _ = yield from self.reader.until(self.name_end, limit=MAX_NAME_CHARS)
        return self.name(text.strip())

    def _parameter(self, function: str) -> Steps[bool]:
        """One parameter after its start; False if it is cut off or no parameter."""
        reader = self.reader
        text, stop = yield from reader.until(self.key_end, limit=MAX_NAME_CHARS)
        key, says_string = self._key(text.strip())
        if stop and self.value_start:
            yield from reader.space()
            stop = yield from reader.word(self.value_start)
        self.arguments(f'"{quoted(key)}": ' if stop else quoted(self.key_start + text))
        if not stop:
            return False
        schema = self.parameters.get(function, {}).get(key)
        if self.trims_lines:
            yield from reader.word("\n")
        is_text = _types(schema) == {"string"} if says_string is None else says_string
        if is_text:
            return (yield from self._text())
        found: list[str] = []
        end = yield from reader.pass_until(found.append, self.value_end)
        text = "".join(found)
        self.arguments(_as_json(text.strip(), schema, self._trimmed(text)) if end else quoted(text))
        return bool(end)

    def _key(self, text: str) -> tuple[str, bool | None]:
        """A parameter's name, and whether it is a string if the form says that."""
        return text, None

    def _text(self) -> Steps[bool]:
        """A string, passed on while it arrives; False if it is cut off."""
        held = ""  # a line break that may be the last

        def emit(text: str) -> None:
            nonlocal held
            text = held + text
            held = "\n" if self.trims_lines and text.endswith("\n") else ""
            self.arguments(quoted(text.removesuffix("\n") if held else text))

        self.arguments('"')
        end = yield from self.reader.pass_until(emit, self.value_end)
        self.arguments('"' if end else quoted(held))
        return bool(end)

    def _trimmed(self, text: str) -> str:
        return text.removesuffix("\n") if self.trims_lines else text


class QwenToolParser(TagToolParser, HermesToolParser):
    """Reads both forms of Qwen's models: the type of a model does not tell which one it writes."""

    def call(self, start: str) -> Steps[None]:
        yield from self.reader.space()
        is_json = start == self.group and (yield from self.reader.char()) in ("{", "[")
        yield from (
            HermesToolParser.call(self, start) if is_json else TagToolParser.call(self, start)
        )


class GlmToolParser(TagToolParser):
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>"""

    start, end = "<tool_call>", "</tool_call>"
    key_start, key_end = "<arg_key>", "</arg_key>"
    value_start, value_end = "<arg_value>", "</arg_value>"
    group_end = end
    starts: ClassVar[tuple[str, ...]] = (start,)
    silent: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = (
        start, end, key_start, key_end, value_start, value_end,
    )  # fmt: skip
    trims_lines = False

    def _function(self, start: str) -> Steps[str]:
        stops = (self.key_start, self.end)
        text, stop = yield from self.reader.until(*stops, limit=MAX_NAME_CHARS)
        name = self.name(text.strip())
        if name:
            self.reader.back(len(stop))
        return name


class MiniMaxM2ToolParser(TagToolParser):
    """<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>
    </minimax:tool_call>"""

    group, group_end = "<minimax:tool_call>", "</minimax:tool_call>"
    start, name_end, end = '<invoke name="', '">', "</invoke>"
    key_start, key_end = '<parameter name="', '">'
    starts: ClassVar[tuple[str, ...]] = (group, start)
    silent: ClassVar[tuple[str, ...]] = (group_end,)
    markers: ClassVar[tuple[str, ...]] = (group, group_end)
    trims_lines = False


class SeedOssToolParser(TagToolParser):
    """Qwen3-Coder's tags in a group of their own name, each value on the line of its tags."""

    group, group_end = "<seed:tool_call>", "</seed:tool_call>"
    starts: ClassVar[tuple[str, ...]] = (group, TagToolParser.start)
    silent: ClassVar[tuple[str, ...]] = (group_end,)
    markers: ClassVar[tuple[str, ...]] = (group, group_end)
    trims_lines = False


class DeepSeekV32ToolParser(TagToolParser):
    """<DSML function_calls><DSML invoke name="NAME"><DSML parameter name="KEY" string="true">VALUE
    and end tags, where DSML stands for a special token with full-width bars."""

    token = "\uff5cDSML\uff5c"  # noqa: S105 - of a vocabulary
    group, group_end = f"<{token}function_calls>", f"</{token}function_calls>"
    start, name_end, end = f'<{token}invoke name="', '">', f"</{token}invoke>"
    key_start, key_end = f'<{token}parameter name="', '">'
    value_end = f"</{token}parameter>"
    starts: ClassVar[tuple[str, ...]] = (group, start)
    silent: ClassVar[tuple[str, ...]] = (group_end,)
    markers: ClassVar[tuple[str, ...]] = (token,)
    trims_lines = False

    def _key(self, text: str) -> tuple[str, bool | None]:
        name, _, says = text.partition('" string="')
        return (name, says == "true") if says in ("true", "false") else (text, None)


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else set()
    if isinstance(kind, list):
        found = {each for each in kind if isinstance(each, str)}
    for word in ("anyOf", "oneOf"):
        for each in schema.get(word) or ():
            found |= _types(each)
    if not found and isinstance(schema.get("enum"), list):
        found = {_KINDS.get(type(each), "string") for each in schema["enum"]}
    return found


def _as_json(word: str, schema: Any, text: str) -> str:
    """A value as JSON: of the types that the schema allows, or what it looks like."""
    types = _types(schema)
    if types & {"boolean", "null"}:
        word = _PYTHON_WORDS.get(word, word)
    try:
        value = load_json(word)
        shown = dump_json(value)
    except Malformed:
        return f'"{quoted(text)}"'
    kind = _KINDS[type(value)]
    fits = kind in types or (kind == "integer" and "number" in types)
    return shown if fits or "string" not in types else f'"{quoted(text)}"'
