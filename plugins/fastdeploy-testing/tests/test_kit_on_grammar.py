"""The kit's tests of grammar backends, on a backend of choices alone and on broken ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import StructuredOutputsParams
from fastdeploy_testing.conformance.test_grammar import (
    EOS,
    VOCAB,
    GrammarConformance,
    make_tokenizer,
)

FAILURE = (AssertionError, pytest.fail.Exception)


class ChoiceMatcher:
    """The tokens so far, and the choices as the bytes of the tokenizer's alphabet."""

    def __init__(self, choices: list[str], spelled: list[str]) -> None:
        self._choices, self._spelled = choices, spelled
        self.tokens: list[int] = []

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether an answer may begin with these tokens."""
        words = list(tokens)
        while words and words[-1] == EOS:
            words.pop()
        text = "".join(self._spelled[t] for t in words)
        if len(words) < len(tokens):
            return text in self._choices
        return any(choice.startswith(text) for choice in self._choices) and EOS not in words

    def accept(self, token_ids: Sequence[int]) -> int:
        for number, token in enumerate(token_ids):
            if not (self.fits([*self.tokens, token]) and self._spelled[token]):
                return number
            self.tokens.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def fill_mask(self, mask: np.ndarray) -> None:
        fit = [bool(s) and self.fits([*self.tokens, t]) for t, s in enumerate(self._spelled)]
        bits = np.zeros(mask.size * 32, dtype=np.uint8)
        bits[: len(fit)] = fit
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def is_finished(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] == EOS


class Choices:
    """A grammar backend that takes choices and refuses all else."""

    name = "choices"
    contract = (1, 0)
    matcher_class: type[ChoiceMatcher] = ChoiceMatcher

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        words = [self._tokenizer.id_to_token(t) or "" for t in range(vocab_size)]
        # Special tokens have no text of their own; the end of text is spelled so that it may fit.
        self._spelled = ["" if w.startswith("<") and len(w) > 2 else w for w in words]
        self._spelled[EOS] = "\0"

    def compile(self, params: StructuredOutputsParams, options: Mapping[str, Any]) -> bytes:
        if not params.choice:
            raise InvalidRequest(f"choices takes no {params.kind}")
        pieces = self._tokenizer.pre_tokenizer.pre_tokenize_str
        spelled = ["".join(piece for piece, _ in pieces(word)) for word in params.choice]
        return json.dumps(spelled).encode()

    def matcher(self, compiled: bytes) -> ChoiceMatcher:
        return self.matcher_class(json.loads(compiled), self._spelled)


class TestChoices(GrammarConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> type[Choices]:
        return Choices


class LetsAllThrough(ChoiceMatcher):
    def fits(self, tokens: Sequence[int]) -> bool:
        return True


class ShutsOut(ChoiceMatcher):
    def fits(self, tokens: Sequence[int]) -> bool:
        return super().fits(tokens) and tokens[-1] % 7 != 3


class KeepsBits(ChoiceMatcher):
    def fill_mask(self, mask: np.ndarray) -> None:
        whole = np.empty_like(mask)
        super().fill_mask(whole)
        mask |= whole


class TooWide(ChoiceMatcher):
    def fill_mask(self, mask: np.ndarray) -> None:
        super().fill_mask(mask)
        mask.view(np.uint32)[VOCAB // 32] |= np.uint32(1 << 31)


class EmptyBehindTheEnd(ChoiceMatcher):
    def fill_mask(self, mask: np.ndarray) -> None:
        super().fill_mask(mask)
        if self.is_finished():
            mask[:] = 0


class TakesAnything(ChoiceMatcher):
    def accept(self, token_ids: Sequence[int]) -> int:
        self.tokens += token_ids
        return len(token_ids)


class TakesTheWrongOne(ChoiceMatcher):
    def accept(self, token_ids: Sequence[int]) -> int:
        taken = super().accept(token_ids)
        self.tokens += token_ids[taken : taken + 1]
        return taken


class NeverGoesBack(ChoiceMatcher):
    def rollback(self, num_tokens: int) -> None:
        pass


class GoesBackTooFar(ChoiceMatcher):
    def rollback(self, num_tokens: int) -> None:
        super().rollback(min(num_tokens + 1, len(self.tokens)))


class Shared(ChoiceMatcher):
    everyones: list[int] = []  # noqa: RUF012 - the fault

    def __init__(self, choices: list[str], spelled: list[str]) -> None:
        super().__init__(choices, spelled)
        self.tokens = self.everyones


class NeverFinished(ChoiceMatcher):
    def is_finished(self) -> bool:
        return False


BROKEN = [
    (LetsAllThrough, "test_what_the_masks_let_through_fits"),
    (ShutsOut, "test_nothing_that_fits_is_shut_out"),
    (KeepsBits, "test_what_the_masks_let_through_fits"),
    (TooWide, "test_what_the_masks_let_through_fits"),
    (EmptyBehindTheEnd, "test_nothing_that_fits_is_shut_out"),
    (TakesAnything, "test_accept_stops_at_the_first_token_that_does_not_fit"),
    (TakesTheWrongOne, "test_accept_stops_at_the_first_token_that_does_not_fit"),
    (NeverGoesBack, "test_rollback_undoes_exactly_that"),
    (GoesBackTooFar, "test_rollback_undoes_exactly_that"),
    (Shared, "test_sequences_do_not_meet"),
    (NeverFinished, "test_nothing_that_fits_is_shut_out"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def run(tokenizer: Tokenizer, matcher: type[ChoiceMatcher], test: str) -> None:
    """One test of the suite on choices, walked by that matcher."""
    backend = Choices(tokenizer.to_str(), VOCAB, [EOS])
    backend.matcher_class = matcher
    words = {"backend": backend, "kind": "choice", "tokenizer": tokenizer}
    method = getattr(GrammarConformance(), test)
    method(**{name: words[name] for name in signature(method).parameters})


@pytest.mark.parametrize(("matcher", "test"), BROKEN)
def test_broken_backends_fail(
    tokenizer: Tokenizer, matcher: type[ChoiceMatcher], test: str
) -> None:
    run(tokenizer, ChoiceMatcher, test)
    with pytest.raises(FAILURE):
        run(tokenizer, matcher, test)


def test_a_backend_that_fails_otherwise_than_by_refusing_is_found(tokenizer: Tokenizer) -> None:
    class Crashes(Choices):
        def compile(self, params: StructuredOutputsParams, options: Mapping[str, Any]) -> bytes:
            raise ValueError("no")

    backend = Crashes(tokenizer.to_str(), VOCAB, [EOS])
    suite = GrammarConformance()
    with pytest.raises(ValueError, match="no"):
        suite.test_a_constraint_that_cannot_be_is_refused(
            backend, StructuredOutputsParams(regex="[a-")
        )
