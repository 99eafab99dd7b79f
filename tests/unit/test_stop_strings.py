"""Stop strings are found wherever the text is cut, and no part of them is ever shown."""

from __future__ import annotations

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_core.tokenizer import StopStringMatcher

LETTERS = "abc"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The stop string whose end comes first; of several, the longest (by definition, slowly)."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


def feed(text: str, stops: list[str], cuts: list[int], include: bool) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops, include)
    shown, edges = "", sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(edges):
        new, stop = matcher.push(text[begin:end])
        shown += new
        if stop is not None:
            return shown, stop
    return shown + matcher.finish(), None


@settings(max_examples=400, deadline=None)
@given(st.text(LETTERS, max_size=40), STOPS, st.lists(st.integers(0, 40)), st.booleans())
def test_the_result_is_the_definition_for_every_way_of_cutting(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    expected = first_stop(text, stops)
    shown, stop = feed(text, stops, cuts, include)
    if expected is None:
        assert (shown, stop) == (text, None)
    else:
        begin, word = expected
        assert stop == word
        assert shown == text[: begin + (len(word) if include else 0)]


@settings(max_examples=200, deadline=None)
@given(st.text(LETTERS, max_size=30), STOPS)
def test_what_is_shown_can_never_turn_out_to_be_part_of_a_stop_string(
    text: str, stops: list[str]
) -> None:
    matcher = StopStringMatcher(stops)
    shown = ""
    for i, char in enumerate(text):
        new, stop = matcher.push(char)
        shown += new
        if stop is not None:
            return
        held = text[len(shown) : i + 1]
        assert shown + held == text[: i + 1]
        # Held back is exactly the longest end that begins a stop string: no more, no less.
        ends = [text[k : i + 1] for k in range(i + 1)]
        longest = next((e for e in ends if any(s.startswith(e) and s != e for s in stops)), "")
        assert held == longest


def test_text_within_min_tokens_does_not_stop_but_may_begin_a_stop_string() -> None:
    matcher = StopStringMatcher(["xy", "END"])
    assert matcher.push("a xy b EN", match=False) == ("a xy b ", None)
    assert matcher.push("D rest") == ("", "END")


def test_hostile_text_costs_linear_time() -> None:
    stops = ["a" * length + "b" for length in range(200, 216)]
    matcher = StopStringMatcher(stops)

    def seconds(num_pieces: int) -> float:
        started = time.process_time()
        for _ in range(num_pieces):
            matcher.push("a" * 10_000)
        return time.process_time() - started

    # Four times the text: quadratic behaviour would take sixteen times as long. The least of some
    # turns, because a machine that stands still may be charged to any.
    short, long = zip(*((seconds(5), seconds(20)) for _ in range(4)), strict=True)
    assert min(long) < 10 * min(short)
