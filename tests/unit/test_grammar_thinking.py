"""A grammar after thinking: what may be written when, and going back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fastdeploy_core.parsers.answer import thinking_ahead
from fastdeploy_core.parsers.reasoning import DeepSeekR1Parser, ThinkParser
from fastdeploy_core.sampling.after_thinking import MatcherAfterThinking
from fastdeploy_core.types import GrammarStart

BEGIN, END, EOS = 40, 41, 2
WORD = [10, 11, 12]  # what the grammar wants, then EOS


class WordMatcher:
    """The grammar of one word."""

    def __init__(self) -> None:
        self.taken = 0

    def accept(self, token_ids: Sequence[int]) -> int:
        for number, token in enumerate(token_ids):
            if token != [*WORD, EOS][self.taken]:
                return number
            self.taken += 1
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= self.taken
        self.taken -= num_tokens

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[:] = 0
        token = [*WORD, EOS][min(self.taken, len(WORD))]
        mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def is_finished(self) -> bool:
        return self.taken >= len(WORD)


def possible(matcher: MatcherAfterThinking) -> set[int]:
    mask = np.zeros(2, dtype=np.int32)
    matcher.fill_mask(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


ALL = set(range(64))
OPTIONAL = GrammarStart(END, BEGIN)


def test_the_grammar_binds_behind_the_end_of_thinking() -> None:
    matcher = MatcherAfterThinking(WordMatcher(), GrammarStart(END))
    assert possible(matcher) == ALL
    assert matcher.accept([5, BEGIN, EOS, 7]) == 4
    assert possible(matcher) == ALL
    assert not matcher.is_finished()
    assert matcher.accept([END]) == 1
    assert possible(matcher) == {10}
    assert matcher.accept([10, 99]) == 1
    assert matcher.accept([11, 12]) == 2
    assert matcher.is_finished()
    assert possible(matcher) == {EOS}


def test_a_model_that_need_not_think_may_begin_either_way() -> None:
    matcher = MatcherAfterThinking(WordMatcher(), OPTIONAL)
    assert possible(matcher) == {10, BEGIN}
    assert matcher.accept([5]) == 0
    assert possible(matcher) == {10, BEGIN}
    assert matcher.accept([10]) == 1
    assert possible(matcher) == {11}
    assert matcher.accept([BEGIN]) == 0
    thinker = MatcherAfterThinking(WordMatcher(), OPTIONAL)
    assert thinker.accept([BEGIN]) == 1
    assert possible(thinker) == ALL


@pytest.mark.parametrize(
    ("start", "tokens"),
    [
        (GrammarStart(END), [7, 8, END, *WORD, EOS]),
        (GrammarStart(END), [END, *WORD]),
        (OPTIONAL, [BEGIN, 7, END, *WORD]),
        (OPTIONAL, [BEGIN, END, 10]),
        (OPTIONAL, [*WORD, EOS]),
    ],
)
def test_going_back_is_like_never_having_gone(start: GrammarStart, tokens: list[int]) -> None:
    for keep in range(len(tokens) + 1):
        gone = MatcherAfterThinking(WordMatcher(), start)
        assert gone.accept(tokens) == len(tokens)
        gone.rollback(len(tokens) - keep)
        fresh = MatcherAfterThinking(WordMatcher(), start)
        assert fresh.accept(tokens[:keep]) == keep
        assert possible(gone) == possible(fresh)
        assert gone.is_finished() == fresh.is_finished()
        assert gone.accept(tokens[keep:]) == len(tokens) - keep


@pytest.mark.parametrize(
    ("parser", "prompt", "kwargs", "begin", "end"),
    [
        (ThinkParser, "hi<|assistant|>", {}, "<think>", "</think>"),
        (ThinkParser, "hi<|assistant|><think>\n", {}, None, "</think>"),
        (DeepSeekR1Parser, "hi<|assistant|>", {}, None, "</think>"),
        (ThinkParser, "hi<think>", {}, None, "</think>"),
    ],
)
def test_parsers_say_how_thinking_will_look(
    parser: type, prompt: str, kwargs: dict, begin: str | None, end: str
) -> None:
    ahead = thinking_ahead(parser, prompt, kwargs)
    assert ahead is not None
    assert (ahead.begin, ahead.end) == (begin, end)


@pytest.mark.parametrize("parser", [ThinkParser, DeepSeekR1Parser])
def test_nothing_waits_where_nobody_thinks(parser: type) -> None:
    assert thinking_ahead(parser, "hi<think>\n\n</think>\n\n") is None
    assert thinking_ahead(parser, "hi", {"enable_thinking": False}) is None
    assert thinking_ahead(None, "hi<think>") is None
