"""The tools of a call: as the chat path takes them, and what each was called by the client."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

MAX_NAME_CHARS = 64  # of a function in the chat path
_PLAIN = re.compile(rf"[\w.-]{{1,{MAX_NAME_CHARS}}}", re.ASCII)
_TEXT_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the client names it. A custom tool takes one text instead of arguments."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def shown_name(name: str, namespace: str | None = None) -> str:
    """The function's name for the model: what does not fit into one is replaced by a hash."""
    full = f"{namespace}__{name}" if namespace else name
    if _PLAIN.fullmatch(full):
        return full
    digest = hashlib.sha256(full.encode("utf-8")).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', full)[: MAX_NAME_CHARS - 9]}_{digest}"


class Tools:
    """`functions`: the tools in the chat path's form, by the name that the model sees."""

    def __init__(self) -> None:
        self.functions: dict[str, dict[str, Any]] = {}
        self._given: dict[str, Tool] = {}

    def add(self, tool: Tool, description: str | None, parameters: dict[str, Any] | None) -> None:
        """One more; a later tool of the same name replaces the earlier one."""
        name = shown_name(tool.name, tool.namespace)
        function: dict[str, Any] = {"name": name}
        if description:
            function["description"] = description
        function["parameters"] = _TEXT_INPUT if tool.is_custom else parameters or {"type": "object"}
        self.functions[name] = {"type": "function", "function": function}
        self._given[name] = tool

    def keep(self, names: set[str]) -> None:
        """Show the model these alone."""
        self.functions = {name: f for name, f in self.functions.items() if name in names}

    def given(self, name: str) -> Tool:
        """What the client calls the function that the model named."""
        return self._given.get(name) or Tool(name)

    def echo(self) -> list[dict[str, Any]]:
        """The tools as /v1/responses names them in its answers."""
        shown = []
        for name, entry in self.functions.items():
            tool, function = self._given[name], entry["function"]
            item = {"name": tool.name, "description": function.get("description")}
            if tool.is_custom:
                item["type"] = "custom"
            else:
                item.update(type="function", parameters=function["parameters"], strict=False)
            shown.append(item)
        return shown
