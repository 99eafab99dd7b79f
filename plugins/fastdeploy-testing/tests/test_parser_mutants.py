"""The kit fails every parser with one fault, with samples that a third party would write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fd_parsers.hermes import HermesToolParser
from fd_parsers.tags import TagToolParser

from fastdeploy_core.contracts.small import ParsedDelta, ToolCallDelta
from fastdeploy_testing.conformance.test_stream_parser import TOOL, StreamParserConformance

JSON_SAMPLE = (
    'Let me see.\n<tool_call>{"name": "f", "arguments": {"q": "a \\" b", "n": [1]}}</tool_call>\n'
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
)
TAG_SAMPLE = (
    "Let me see.\n<tool_call>\n<function=f>\n<parameter=q>\na b\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=f>\n<parameter=n>\n[1, 2]\n</parameter>\n</function>\n"
    "</tool_call>"
)
Change = Callable[[Any, ParsedDelta], ParsedDelta]  # the parser, and what it found


def drops_the_last_piece(parser: Any, found: ParsedDelta) -> ParsedDelta:
    for call in found.tool_calls:
        call.arguments = call.arguments.removesuffix("}")
    return found


def loses_text_before_a_call(parser: Any, found: ParsedDelta) -> ParsedDelta:
    return ParsedDelta("", found.reasoning, found.tool_calls) if found.tool_calls else found


def reorders_calls(parser: Any, found: ParsedDelta) -> ParsedDelta:
    return ParsedDelta(found.content, "", found.tool_calls[::-1])


def numbers_calls_from_one(parser: Any, found: ParsedDelta) -> ParsedDelta:
    for call in found.tool_calls:
        call.index += 1
    return found


def numbers_all_calls_zero(parser: Any, found: ParsedDelta) -> ParsedDelta:
    for call in found.tool_calls:
        call.index = 0
    return found


def numbers_pieces_alone(parser: Any, found: ParsedDelta) -> ParsedDelta:
    parser.count = getattr(parser, "count", -1)
    for call in found.tool_calls:
        parser.count += 1
        call.index = parser.count
    return found


def forgets_ids(parser: Any, found: ParsedDelta) -> ParsedDelta:
    for call in found.tool_calls:
        call.id = None
    return found


def repeats_names(parser: Any, found: ParsedDelta) -> ParsedDelta:
    more = [ToolCallDelta(c.index, name=c.name) for c in found.tool_calls if c.name]
    return ParsedDelta(found.content, "", [*found.tool_calls, *more])


def sends_arguments_first(parser: Any, found: ParsedDelta) -> ParsedDelta:
    calls = []
    for call in found.tool_calls:
        if call.name:
            calls += [ToolCallDelta(call.index, arguments=call.arguments)]
            call.arguments = ""
        calls.append(call)
    return ParsedDelta(found.content, "", calls)


def strips_pieces(parser: Any, found: ParsedDelta) -> ParsedDelta:
    return ParsedDelta(found.content.strip(), "", found.tool_calls)


def doubles_pieces(parser: Any, found: ParsedDelta) -> ParsedDelta:
    for call in found.tool_calls:
        call.arguments *= 1 if call.name else 2
    return found


def cuts_off_after_many_characters(parser: Any, found: ParsedDelta) -> ParsedDelta:
    parser.count = getattr(parser, "count", 0) + len(found.content)
    return found if parser.count < 30 else ParsedDelta("", "", found.tool_calls)


CHANGES = [
    drops_the_last_piece,
    loses_text_before_a_call,
    reorders_calls,
    numbers_calls_from_one,
    numbers_all_calls_zero,
    numbers_pieces_alone,
    forgets_ids,
    repeats_names,
    sends_arguments_first,
    strips_pieces,
    doubles_pieces,
    cuts_off_after_many_characters,
]


def changed(kind: type[Any], change: Change) -> type[Any]:
    """The parser with one fault in what it returns."""

    class Mutant(kind):  # type: ignore[misc]
        def push(self, text: str) -> ParsedDelta:
            return change(self, super().push(text))

        def finish(self) -> ParsedDelta:
            return change(self, super().finish())

    return Mutant


def swallows_a_begun_marker(kind: type[Any]) -> type[Any]:
    class Mutant(kind):  # type: ignore[misc]
        def finish(self) -> ParsedDelta:
            super().finish()
            return ParsedDelta()

    return Mutant


def raises_for_what_is_no_json(kind: type[Any]) -> type[Any]:
    class Mutant(kind):  # type: ignore[misc]
        def read_arguments(self, reading: Any, *ends: str) -> Any:
            yield from reading
            return None

        def _parameter(self, function: str) -> Any:
            if not (yield from super()._parameter(function)):
                raise ValueError("no parameter")
            return True

    return Mutant


def loses_what_is_no_call(kind: type[Any]) -> type[Any]:
    class Mutant(kind):  # type: ignore[misc]
        def refuse(self) -> None:
            self.reader.release()

        def _whole(self, start: str) -> Any:
            yield from self.reader.pass_until(lambda text: None, self.end)
            self.reader.release()

    return Mutant


def loses_what_stands_between(kind: type[Any]) -> type[Any]:
    class Mutant(kind):  # type: ignore[misc]
        def show(self, text: str) -> None:
            super().show(text if self.num_calls == 0 else "")

    return Mutant


def reads_whole_pieces_only(kind: type[Any]) -> type[Any]:
    class Mutant(kind):  # type: ignore[misc]
        def push(self, text: str) -> ParsedDelta:
            start = self.starts[0]
            if len(text) < len(start) and text and text in start and text.startswith("<"):
                return ParsedDelta(text)
            found: ParsedDelta = super().push(text)
            return found

    return Mutant


MAKERS = [
    swallows_a_begun_marker,
    raises_for_what_is_no_json,
    loses_what_is_no_call,
    loses_what_stands_between,
    reads_whole_pieces_only,
]
PARSERS = [(HermesToolParser, JSON_SAMPLE), (TagToolParser, TAG_SAMPLE)]


class Entry:
    kind = "tool_parser"


def failures(kind: type[Any], sample: str) -> list[str]:
    """The tests of the kit that fail for this parser."""

    class Suite(StreamParserConformance):
        samples = (sample,)

    suite, failed = Suite(), []
    given = {"driver": kind, "make": lambda: kind([TOOL]), "fd_entry": Entry}
    for name in [each for each in dir(Suite) if each.startswith("test_")]:
        test = getattr(suite, name)
        wanted = test.__code__.co_varnames[1 : test.__code__.co_argcount]
        try:
            test(**{word: given[word] for word in wanted})
        except pytest.skip.Exception:
            continue
        except Exception:  # a parser that raises fails the test, too
            failed.append(name)
    return failed


@pytest.mark.parametrize(("kind", "sample"), PARSERS)
def test_a_right_parser_passes(kind: type[Any], sample: str) -> None:
    assert failures(kind, sample) == []


@pytest.mark.parametrize(("kind", "sample"), PARSERS)
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_what_is_found_lives(change: Change, kind: type[Any], sample: str) -> None:
    assert failures(changed(kind, change), sample)


@pytest.mark.parametrize(("kind", "sample"), PARSERS)
@pytest.mark.parametrize("make", MAKERS)
def test_no_change_of_a_parser_lives(
    make: Callable[[type[Any]], type[Any]], kind: type[Any], sample: str
) -> None:
    assert failures(make(kind), sample)


def test_the_template_passes_with_its_own_sample() -> None:
    from fd_mycalls.parser import MyCallsParser

    sample = 'Let me see. <call>{"name": "f", "arguments": {"q": "</call"}}</call> Done.'
    assert failures(MyCallsParser, sample) == []
