"""N-gram and suffix drafts against plain searches, and the memory they keep."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from fd_speculative import history
from fd_speculative.automaton import SuffixAutomaton
from fd_speculative.history import TokenHistory
from fd_speculative.ngram import NgramDrafter
from fd_speculative.suffix import SuffixDrafter

from fastdeploy_core.contracts.speculative import DrafterContext, HostDraftInput
from fastdeploy_core.errors import ConfigError


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def ask(drafter, seq_id: int, tokens: list[int], limit: int = 4, drafts: list[int] = ()):
    question = HostDraftInput([seq_id], [array(tokens)], [limit], [list(drafts)])
    (proposal,) = drafter.propose(question)
    return proposal


def make(kind, **options):
    return kind(DrafterContext(4, options, vocab_size=1000, max_num_seqs=8))


def longest_match(tokens: list[int], low: int, high: int, drafts: list[int]) -> tuple[int, int]:
    """The slow way: (length, place after the most recent occurrence)."""
    whole, best = tokens + drafts, (0, 0)
    for length in range(low, high + 1):
        tail = whole[-length:]
        for end in range(len(tokens) - 2, length - 2, -1):
            if len(whole) > length and tokens[end - length + 1 : end + 1] == tail:
                best = (length, end + 1)
                break
    return best


@pytest.mark.parametrize("vocab", [3, 8, 40])
def test_history_finds_the_longest_match(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_PLACES", 10**6)
    random = Random(vocab)
    for _ in range(60):
        low = random.randint(1, 3)
        high = random.randint(low, 6)
        tokens = [random.randrange(vocab) for _ in range(random.choice([0, 1, 5, 70, 130]))]
        index = TokenHistory(low, high)
        for _ in range(40):
            repeats = random.random() < 0.3 and len(tokens) > 7
            tokens.append(tokens[-7] if repeats else random.randrange(vocab))
            if random.random() < 0.3:
                continue  # several tokens at once
            drafts = [random.randrange(vocab) for _ in range(random.choice([0, 0, 1, 3]))]
            expected = longest_match(tokens, low, high, drafts)
            assert index.match(array(tokens), drafts) == expected


def test_ngram_drafts_continue_the_match_and_then_themselves() -> None:
    drafter = make(NgramDrafter)
    assert ask(drafter, 0, [1, 2, 3, 9, 8, 7, 1, 2, 3]) == [9, 8, 7, 1]
    assert ask(drafter, 1, [5, 6, 5, 6, 5, 6]) == [5, 6, 5, 6]
    assert ask(drafter, 2, [4, 4, 4]) == [4, 4, 4, 4]
    assert ask(drafter, 3, [1, 2, 3, 4]) == []
    assert ask(drafter, 4, [7]) == []
    # The most recent of equally long matches.
    assert ask(drafter, 5, [1, 2, 3, 0, 1, 2, 4, 0, 1, 2], limit=1) == [4]
    # A longer match beats a more recent one.
    assert ask(drafter, 6, [9, 1, 2, 3, 0, 8, 1, 2, 4, 0, 9, 1, 2], limit=1) == [3]
    assert ask(drafter, 7, [1, 2, 3, 9, 8, 7, 5, 1], drafts=[2, 3], limit=2) == [9, 8]


def test_ngram_forgets_with_its_sequence() -> None:
    drafter = make(NgramDrafter, min_ngram_size=1)
    assert ask(drafter, 3, [1, 2, 1]) == [2, 1, 2, 1]
    drafter.forget(3)
    assert ask(drafter, 3, [5, 6, 7]) == []
    drafter.forget(3)
    drafter.forget(99)
    assert not drafter._histories


def test_automaton_knows_the_longest_ending_that_occurred_before() -> None:
    random = Random(1)
    for _ in range(60):
        vocab = random.choice([2, 3, 6])
        texts: list[list[int]] = [[], [], []]
        tips, automaton = [0, 0, 0], SuffixAutomaton()
        for _ in range(60):
            number = random.randrange(3)
            texts[number].append(random.randrange(vocab))
            tips[number], state = automaton.append(tips[number], texts[number][-1])
            assert automaton.length[state] == longest_before(texts, number)


def longest_before(texts: list[list[int]], number: int) -> int:
    text, best = texts[number], 0
    for length in range(1, len(text) + 1):
        tail = text[-length:]
        elsewhere = any(
            other[end - length : end] == tail
            for index, other in enumerate(texts)
            for end in range(length, len(other) + 1)
            if not (index == number and end == len(text))
        )
        if not elsewhere:
            break
        best = length
    return best


def test_automaton_follows_texts_that_it_does_not_take_in() -> None:
    random, automaton = Random(4), SuffixAutomaton()
    text = [random.randrange(4) for _ in range(120)]
    tip = 0
    for token in text:
        tip, _ = automaton.append(tip, token)
    state, length, other = 0, 0, []
    for _ in range(200):
        other.append(random.randrange(5))
        state, length = automaton.follow(state, length, other[-1])
        known = max(
            n
            for n in range(len(other) + 1)
            if not n or any(text[i : i + n] == other[-n:] for i in range(len(text)))
        )
        assert length == known


def test_suffix_learns_from_past_outputs_of_other_sequences() -> None:
    drafter = make(SuffixDrafter)
    ask(drafter, 0, [1, 2])
    ask(drafter, 0, [1, 2, 50, 51, 52, 53, 54])
    drafter.forget(0)
    assert ask(drafter, 1, [9, 9, 7, 50, 51]) == [52, 53]  # no more than what matched
    # The own text counts where it matches longer.
    assert ask(drafter, 2, [60, 50, 51, 99, 98, 60, 50, 51]) == [99, 98, 60]


def test_suffix_prefers_what_followed_more_often_and_stops_where_it_is_unsure() -> None:
    drafter = make(SuffixDrafter, min_token_prob=0.4, max_spec_factor=4.0)
    for seq_id, after in enumerate([70, 71, 70, 70, 72, 70]):
        ask(drafter, seq_id, [1, 40 + seq_id, 41, 42, 43, after])
        drafter.forget(seq_id)
    assert ask(drafter, 90, [8, 41, 42, 43], limit=1) == [70]
    unsure = make(SuffixDrafter, min_token_prob=0.95, max_spec_factor=4.0)
    for seq_id, after in enumerate([70, 71, 72]):
        ask(unsure, seq_id, [1, 40 + seq_id, 41, 42, 43, after])
    assert ask(unsure, 90, [8, 41, 42, 43], limit=1) == []


def test_suffix_memory_is_bounded_and_keeps_what_is_recent() -> None:
    drafter = make(SuffixDrafter, max_cached_tokens=400)
    random = Random(3)
    for seq_id in range(60):
        text = [seq_id, *(random.randrange(1000) for _ in range(40))]
        for end in range(1, len(text) + 1):
            ask(drafter, seq_id, text[:end])
        drafter.forget(seq_id)
        states = len(drafter._young.length) + len(drafter._old.length)
        assert states <= 2 * 400 + 2
    assert ask(drafter, 100, [text[-6], text[-5], text[-4]]) == text[-3:]
    assert not drafter._texts.keys() - {100}
    few = make(SuffixDrafter, max_cached_requests=2)
    for seq_id in range(9):
        ask(few, seq_id, [seq_id, 200 + seq_id, 300 + seq_id])
        few.forget(seq_id)
    assert len(few._young.length) + len(few._old.length) < 20
    none = make(SuffixDrafter, max_cached_requests=0)
    ask(none, 0, [1, 2, 3, 4])
    assert ask(none, 1, [1, 2]) == [] and len(none._young.length) == 1


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (NgramDrafter, {"max_ngram": 3}, "did you mean max_ngram_size"),
        (NgramDrafter, {"min_ngram_size": 6}, "between 1 and max_ngram_size"),
        (NgramDrafter, {"max_ngram_size": "5"}, "must be of type int"),
        (SuffixDrafter, {"max_depth": 0}, "between 1 and 1024"),
        (SuffixDrafter, {"min_token_prob": 2}, "between 0 and 1"),
        (SuffixDrafter, {"max_spec_factor": True}, "must be of type float"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused(kind, options, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(kind, **options)
