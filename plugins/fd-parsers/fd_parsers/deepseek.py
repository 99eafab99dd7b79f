"""DeepSeek's tool calls, in the two forms its releases use.

V3, R1:  begin "function" sep NAME, a line break, a ```json block with the arguments, end.
V3.1:    begin NAME sep ARGUMENTS end.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .tagged import MalformedCall, TaggedToolParser, checked_arguments, checked_name, load_json

_SPACE = "\u2581"  # DeepSeek's markers use full-width bars, and this character for a space


def _marker(words: str) -> str:
    return f"<\uff5c{words.replace(' ', _SPACE)}\uff5c>"


SEPARATOR = _marker("tool sep")
FENCE = "```"


class DeepSeekToolParser(TaggedToolParser):
    """Parser for both forms; the text after the separator tells which one it is."""

    start = _marker("tool call begin")
    end = _marker("tool call end")
    silent = (_marker("tool calls begin"), _marker("tool calls end"))
    markers: ClassVar[tuple[str, ...]] = (start, end, SEPARATOR, *silent)

    def read(self, body: str) -> list[tuple[str, Any]]:
        before, separator, after = body.partition(SEPARATOR)
        if not separator:
            raise MalformedCall
        name, arguments = before.strip(), after.strip()
        if name == "function" and FENCE in arguments:
            name, _, block = arguments.partition(FENCE)
            name = name.strip()
            arguments = block.strip().removeprefix("json").removesuffix(FENCE).strip()
        value = load_json(arguments) if arguments else {}
        return [(checked_name(name), checked_arguments(value))]
