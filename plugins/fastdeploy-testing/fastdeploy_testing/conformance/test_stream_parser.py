"""Parsers of reasoning and of tool calls: one result for every way in which the text arrives."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from fastdeploy_core.contracts.small import ParsedDelta

from .base import Conformance

if TYPE_CHECKING:
    from fastdeploy_core.plugins.discovery import PluginEntry

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
# Words between markers; what looks like the beginning of a marker, or of JSON, is among them.
WORDS = ("2 < 3", "</", "\n\n", '{"name": "f", "arguments": {"q": "a \\" }"}}', "你好", "", "<|")


class StreamParserConformance(Conformance):
    """Add whole answers of your model to `samples`, with calls of the function `f` for a parser of
    calls: they are cut and damaged everywhere, too."""

    samples: ClassVar[tuple[str, ...]] = ()

    @pytest.fixture
    def make(self, driver: Any, fd_entry: PluginEntry) -> Any:
        """A function that makes a parser for one answer, as the server does."""
        if fd_entry.kind == "tool_parser":
            return lambda: driver([TOOL])
        return lambda: driver("", {})

    def texts(self, driver: Any) -> list[str]:
        """Samples, and every order of two markers with words around and between."""
        found = [*self.samples, *WORDS]
        for number, (one, other) in enumerate(itertools.permutations((*driver.markers, ""), 2)):
            before, after = (WORDS[(number + n) % len(WORDS)] for n in (0, 3))
            for between in WORDS if one and other else WORDS[:1]:
                found.append(f"{before}{one}{between}{other}{after}")
        return found

    def test_markers_are_declared(self, driver: Any) -> None:
        assert isinstance(driver.markers, tuple), "markers is a tuple of special tokens, perhaps ()"
        assert all(isinstance(marker, str) and marker for marker in driver.markers)

    def test_any_split_of_the_stream_gives_the_same(self, driver: Any, make: Any) -> None:
        for text in self.texts(driver):
            whole = collect(make(), [text])
            rng = random.Random(len(text))  # noqa: S311 - where to cut
            cuts = [sorted(rng.sample(range(len(text) + 1), min(3, len(text)))) for _ in range(20)]
            ways = [list(text), *(pieces(text, places) for places in cuts)]
            ways += [pieces(text, [place]) for place in range(len(text))]
            for way in ways:
                assert collect(make(), way) == whole, f"{text!r} in pieces {way!r:.200}"

    def test_empty_pieces_change_nothing(self, driver: Any, make: Any) -> None:
        for text in self.texts(driver):
            apart = list(itertools.chain.from_iterable((c, "") for c in text))
            assert collect(make(), ["", *apart]) == collect(make(), [text]), repr(text)

    def test_text_without_markers_stays_whole(self, driver: Any, make: Any) -> None:
        text = "One two.\n  Three, 4 of 5: äöü 你好"
        found = collect(make(), list(text))
        assert found["content"] + found["reasoning"] == text and not found["calls"]

    def test_the_beginning_of_a_marker_is_text_after_all(self, driver: Any, make: Any) -> None:
        for marker in driver.markers:
            for count in range(1, len(marker)):
                text = f"So{marker[:count]}"
                found = collect(make(), list(text))
                assert found["content"] + found["reasoning"] == text, "text that was held back"

    def test_what_was_held_back_belongs_where_the_text_before_it_did(
        self, driver: Any, make: Any
    ) -> None:
        for one, other in itertools.permutations((*driver.markers, ""), 2):
            for count in range(1, len(other)):
                text = f"{one}{STRAY[0]}{other[:count]}"
                found = collect(make(), list(text))
                places = [p for p in ("content", "reasoning") if STRAY[0] in found[p]]
                for place in places:
                    assert other[:count] in found[place], f"the end of {text!r} is not {place}"

    def test_only_a_parser_of_thinking_finds_thinking(
        self, fd_entry: PluginEntry, driver: Any, make: Any
    ) -> None:
        found = [collect(make(), list(text)) for text in self.texts(driver)]
        if fd_entry.kind == "tool_parser":
            assert not any(each["reasoning"] for each in found), "a parser of calls found thinking"
        else:
            assert not any(each["calls"] for each in found), "a parser of thinking found calls"

    def test_answers_at_the_same_time_do_not_meet(self, driver: Any, make: Any) -> None:
        texts = self.texts(driver)[-8:]
        parsers = [make() for _ in texts]
        parts: list[list[ParsedDelta]] = [[] for _ in texts]
        for characters in itertools.zip_longest(*texts, fillvalue=""):
            for parser, character, found in zip(parsers, characters, parts, strict=True):
                found.append(parser.push(character))
        for parser, found, text in zip(parsers, parts, texts, strict=True):
            found.append(parser.finish())
            assert joined(found) == collect(make(), [text]), repr(text)

    def test_calls_have_a_name_once_and_arguments_of_json(self, driver: Any, make: Any) -> None:
        for text in self.texts(driver):
            for call in collect(make(), list(text))["calls"]:
                assert call["names"] == 1, f"{text!r}: a call's name comes once"
                assert call["begun"], f"{text!r}: a call begins with its id and name"
        for text in self.samples:
            for call in collect(make(), list(text))["calls"]:
                assert isinstance(json.loads(call["arguments"] or "{}"), dict), repr(text)

    def test_calls_are_numbered_in_their_order(self, driver: Any, make: Any) -> None:
        for text in self.texts(driver):
            order = collect(make(), list(text))["order"]
            assert order == sorted(order) and set(order) == set(range(len(set(order)))), (
                f"{text!r}: calls are numbered 0, 1, .., one after the other, not {order}"
            )

    def test_samples_of_calls_hold_calls(self, fd_entry: PluginEntry, make: Any) -> None:
        if fd_entry.kind != "tool_parser" or not self.samples:
            pytest.skip("there are no samples of calls")
        for text in self.samples:
            for way in ([text], list(text)):
                calls = collect(make(), way)["calls"]
                assert calls and {call["name"] for call in calls} == {"f"}, repr(text)

    def test_text_around_calls_stays(self, make: Any) -> None:
        for text in self.samples:
            for whole in (f"Before it. {text}", f"{text} After it."):
                found = collect(make(), list(whole))
                said = whole[:10] if whole.startswith("Before") else "After it."
                assert said in shown(found), f"{said!r} is lost from {whole!r}"

    def test_damaged_answers_lose_no_word(self, make: Any) -> None:
        """Words that stand where none belong are content, thinking, or part of a call."""
        for text in self.samples:
            for place, words in itertools.product(range(len(text) + 1), (STRAY[:1], STRAY)):
                damaged = f"{text[:place]}{' '.join(words)}{text[place:]}"
                found = shown(collect(make(), [damaged]))
                assert all(word in found for word in words), f"a word is lost from {damaged!r}"

    def test_answers_that_are_cut_off_depend_on_no_split(self, driver: Any, make: Any) -> None:
        for text in self.samples:
            for end in range(len(text)):
                found = collect(make(), [text[:end]])
                assert collect(make(), list(text[:end])) == found, repr(text[:end])
                rest = text[:end]
                for marker in driver.markers:
                    rest = rest.replace(marker, "")
                assert not rest.strip() or shown(found).strip(), f"nothing is left of {rest!r}"


STRAY = ("xyzzy", "plugh")


def shown(found: dict[str, Any]) -> str:
    """All that a client gets of an answer."""
    calls = [f"{call['name']} {call['arguments']}" for call in found["calls"]]
    return "\n".join([found["content"], found["reasoning"], *calls])


def pieces(text: str, places: Sequence[int]) -> list[str]:
    """The text cut at these places."""
    ends = [*places, len(text)]
    return [text[a:b] for a, b in zip([0, *places], ends, strict=True)]


def collect(parser: Any, parts: Sequence[str]) -> dict[str, Any]:
    """What an answer amounts to that arrives in these parts."""
    return joined([*(parser.push(part) for part in parts), parser.finish()])


def joined(deltas: Sequence[ParsedDelta]) -> dict[str, Any]:
    """Deltas put together; ids are the parser's own and left out."""
    calls: dict[int, dict[str, Any]] = {}
    order: list[int] = []
    for delta in deltas:
        for call in delta.tool_calls:
            order += [] if order[-1:] == [call.index] else [call.index]
            whole = calls.setdefault(
                call.index,
                {"name": "", "names": 0, "arguments": "", "begun": bool(call.id and call.name)},
            )
            whole["name"] += call.name or ""
            whole["names"] += call.name is not None
            whole["arguments"] += call.arguments
    return {
        "content": "".join(delta.content for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "calls": [calls[index] for index in sorted(calls)],
        "order": order,
    }


class TestStreamParser(StreamParserConformance):
    """Run by `fastdeploy plugins check`."""
