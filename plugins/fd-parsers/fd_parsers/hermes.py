"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen, ERNIE, Granite 4.

Form: https://github.com/NousResearch/Hermes-Function-Calling, and the chat template of Qwen3."""

from __future__ import annotations

from typing import ClassVar

from .calls import REFUSED, ToolCallStream, load_json, whole_call
from .literals import Malformed
from .scan import Steps


class HermesToolParser(ToolCallStream):
    """One JSON object between the tags, or a list of them."""

    group, group_end = "<tool_call>", "</tool_call>"
    starts: ClassVar[tuple[str, ...]] = (group,)
    markers: ClassVar[tuple[str, ...]] = (group, group_end)

    def call(self, start: str) -> Steps[None]:
        before = self.num_calls
        end = yield from self.json_calls(self.group_end)
        if end is None:
            yield from self.tail(self.group_end)
        elif end == REFUSED and self.num_calls > before:
            self.refuse()
        elif end == REFUSED:
            yield from self._whole(start)

    def _whole(self, start: str) -> Steps[None]:
        """A call in another order or form than usual is read when it is complete."""
        found = [self.reader.release()]
        end = yield from self.reader.pass_until(found.append, self.group_end, self.group)
        if end == self.group:
            self.reader.back(len(end))
        text = "".join(found)
        try:
            value = load_json(text.removeprefix(start))
            calls = [whole_call(each) for each in (value if isinstance(value, list) else [value])]
        except Malformed:
            self.show(text + (end if end == self.group_end else ""))
            return
        for name, arguments in calls:
            self.begin(name)
            self.arguments(arguments)
