"""Runs parsers over texts in pieces."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastdeploy_core.contracts.small import ParsedDelta, ReasoningParser, ToolCallDelta, ToolParser
from fastdeploy_core.parsers.answer import AnswerReader

Result = tuple[str, str, list[tuple[int, str | None, str]]]


def run(parser: ReasoningParser | ToolParser | AnswerReader, pieces: list[str]) -> Result:
    deltas: list[ParsedDelta] = [*(parser.push(piece) for piece in pieces), parser.finish()]
    calls: dict[int, ToolCallDelta] = {}
    for piece in (call for delta in deltas for call in delta.tool_calls):
        assert (piece.index in calls) == (piece.name is None) == (piece.id is None)
        assert piece.index in (len(calls), len(calls) - 1), "one call after the other"
        calls.setdefault(piece.index, ToolCallDelta(piece.index, piece.id, piece.name))
        calls[piece.index].arguments += piece.arguments
    assert len({call.id for call in calls.values()}) == len(calls)
    return (
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [(call.index, call.name, call.arguments) for call in calls.values()],
    )


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]  # noqa: RUF007


def check_linear(
    make: Callable[[], ReasoningParser | ToolParser | AnswerReader],
    text: str,
    size: int,
    limit_s: float,
) -> None:
    """That text in pieces of this size means what it means whole, both in less time of the
    processor than that; tried twice, since a machine that stands still may charge a process."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for _ in range(2):
        started = time.process_time()
        assert run(make(), pieces) == run(make(), [text])
        if time.process_time() - started < limit_s:
            return
    raise AssertionError(f"more than {limit_s} s for {text[:80]!r}...")
