"""An answer as blocks (thinking, texts, tool calls), of which one ends before the next begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastdeploy_core.contracts.small import ParsedDelta

Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class Block:
    """`text` is what there is so far: of a call, its arguments. `logprobs`, if they were asked for,
    are of the tokens of a text."""

    kind: Kind
    index: int
    text: str = ""
    name: str = ""
    call_id: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


Step = tuple[Literal["start", "more", "stop"], Block, str]  # the text is that of "more"


class Blocks:
    """Takes what is said and tells what happens to blocks. Space around calls makes no block."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._call = -1
        self._logprobs: list[dict[str, Any]] = []  # of tokens that no block has shown
        self._space: tuple[Kind, str] = ("text", "")  # said, but not yet known to belong to a block

    def add(self, said: ParsedDelta, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Step]:
        """The next piece of the answer. The rest of a call comes before what follows it."""
        self._logprobs += logprobs
        open_call = self._call if self._open is not None and self._open.kind == "call" else None
        for call in said.tool_calls:
            if call.index == open_call and call.arguments:
                yield self._more(call.arguments)
        if said.reasoning:
            yield from self._text("thinking", said.reasoning)
        if said.content:
            yield from self._text("text", said.content)
        for call in said.tool_calls:
            if call.index == open_call:
                continue
            yield from self._begin("call", call.name or "", call.id or "")
            self._call = call.index
            if call.arguments:
                yield self._more(call.arguments)

    def close(self) -> Iterator[Step]:
        """The answer has ended; one of space alone is a block of its own."""
        kind, space = self._space
        if space and not self.all:
            yield from self._begin(kind)
            yield self._more(space)
        if self._open is not None:
            yield "stop", self._open, ""
            self._open = None

    def _text(self, kind: Kind, text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind != kind:
            if self._space[0] == kind:
                text = self._space[1] + text
            if not text.strip():
                self._space = (kind, text)
                return
            yield from self._begin(kind)
        yield self._more(text)

    def _begin(self, kind: Kind, name: str = "", call_id: str = "") -> Iterator[Step]:
        if self._open is not None:
            yield "stop", self._open, ""
        self._space = ("text", "")
        self._open = Block(kind, len(self.all), name=name, call_id=call_id)
        self.all.append(self._open)
        yield "start", self._open, ""

    def _more(self, text: str) -> Step:
        block = self.all[-1]
        block.text += text
        if block.kind == "text":
            block.logprobs += self._logprobs
        self._logprobs = []
        return "more", block, text
