"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen and ERNIE models."""

from __future__ import annotations

from typing import Any, ClassVar

from .tagged import TaggedToolParser, load_json, name_and_arguments


class HermesToolParser(TaggedToolParser):
    """One JSON object between the tags, or a list of them."""

    start = "<tool_call>"
    end = "</tool_call>"
    markers: ClassVar[tuple[str, ...]] = (start, end)

    def read(self, body: str) -> list[tuple[str, Any]]:
        value = load_json(body.strip())
        return [
            name_and_arguments(each) for each in (value if isinstance(value, list) else [value])
        ]
