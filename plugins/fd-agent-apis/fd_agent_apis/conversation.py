"""A conversation as the chat path takes it, built item by item, and where its system texts stand.

Agents put system texts into the middle of a conversation. Moved to the front they would change the
prompt's beginning with each turn, and nothing of it would be found in the prefix cache. So each
stays where it is: as a turn of its own if the chat template can show it, else within its neighbour.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastdeploy_core.errors import InvalidRequest

if TYPE_CHECKING:
    from fastdeploy_core.tokenizer import Tokenizer

Message = dict[str, Any]
Part = str | dict[str, Any]  # a text, or a picture as the chat path takes it
_BREAK = "\n\n"


class Conversation:
    """Messages in the order they came. `ignored`: places in the body that have no effect here.
    `takes_pictures`: users and tools may show pictures to this model."""

    def __init__(self, takes_pictures: bool = False) -> None:
        self.takes_pictures = takes_pictures
        self.messages: list[Message] = []
        self.ignored: list[str] = []

    @property
    def shows_pictures(self) -> bool:
        """Whether a user or a tool showed one."""
        contents = (message.get("content") for message in self.messages)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return any(part["type"] != "text" for part in parts)

    def system(self, texts: Sequence[str]) -> None:
        """Instructions, at the beginning or later."""
        if any(texts):
            self.messages.append({"role": "system", "content": _BREAK.join(filter(None, texts))})

    def user(self, parts: Sequence[Part]) -> None:
        """What the user says and shows, in one or more parts."""
        self.messages.append({"role": "user", "content": _content(parts)})

    def thought(self, text: str) -> None:
        """Thinking of the assistant's turn that is at the end or begins here."""
        self._extend("reasoning_content", text)

    def said(self, text: str) -> None:
        """Text of the assistant's turn."""
        self._extend("content", text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A tool call of the assistant's turn."""
        function = {"name": name, "arguments": arguments}
        entry = {"id": call_id, "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(entry)

    def result(self, call_id: str, parts: Sequence[Part]) -> None:
        """What a tool answered: texts, which are joined, and pictures."""
        pictures = [part for part in parts if not isinstance(part, str)]
        text = "\n".join(part for part in parts if isinstance(part, str))
        content = _content([*pictures, text] if text else pictures)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _turn(self) -> Message:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _extend(self, field: str, text: str) -> None:
        turn = self._turn()
        before = turn.get(field) or ""
        turn[field] = before + _BREAK + text if before and text else before + text


def _content(parts: Sequence[Part]) -> Any:
    """A message's content: one text, or the list of its parts."""
    if len(parts) < 2 and all(isinstance(part, str) for part in parts):
        return "".join(str(part) for part in parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def placed(messages: Sequence[Message], in_place: bool) -> list[Message]:
    """The messages with one system message at the front at most. Later ones stay where they are,
    but never between a call and its results: `in_place` as messages, else within a neighbour."""
    front = 0
    while front < len(messages) and messages[front]["role"] == "system":
        front += 1
    out: list[Message] = []
    if front:
        texts = [message["content"] for message in messages[:front]]
        out.append({"role": "system", "content": _BREAK.join(texts)})
    held: list[str] = []
    for message in messages[front:]:
        if message["role"] == "system":
            held.append(message["content"])
            continue
        if held and message["role"] != "tool":
            message = _put(out, _BREAK.join(held), message, in_place)
            held = []
        out.append(message)
    if held:
        _put(out, _BREAK.join(held), {"role": ""}, in_place)
    return out


def _put(out: list[Message], text: str, following: Message, in_place: bool) -> Message:
    """Put a system text at the end of `out`, or into the message that follows, which is
    returned."""
    if in_place:
        out.append({"role": "system", "content": text})
    elif out and out[-1]["role"] in ("user", "tool"):
        content = out[-1]["content"]
        more: Any = _BREAK + text
        out[-1] = {
            **out[-1],
            "content": content + more
            if isinstance(content, str)
            else [*content, {"type": "text", "text": more}],
        }
    elif following["role"] == "user":
        content = following["content"]
        front: Any = text + _BREAK
        if not isinstance(content, str):
            front = [{"type": "text", "text": front}]
        return {**following, "content": front + content}
    else:
        out.append({"role": "user", "content": text})
    return following


@functools.lru_cache(maxsize=4)
def shows_system_in_place(tokenizer: Tokenizer) -> bool:
    """Whether the chat template shows a later system message as a turn of its own at its place and
    changes nothing else; found by rendering a conversation with and without one."""
    user = {"role": "user", "content": "first question"}
    answer = {"role": "assistant", "content": "first answer"}
    second = {"role": "user", "content": "second question"}
    added = "an added instruction"
    try:
        start = str(tokenizer.apply_chat_template([user], None, False))
        plain = str(tokenizer.apply_chat_template([user, answer, second]))
        system = {"role": "system", "content": added}
        full = str(tokenizer.apply_chat_template([user, system, answer, second]))
    except InvalidRequest:
        return False
    if not plain.startswith(start):
        return False
    rest = plain[len(start) :]
    if not (full.startswith(start) and full.endswith(rest)):
        return False
    segment = full[len(start) : len(full) - len(rest)]
    return added in segment and segment.strip() != added
