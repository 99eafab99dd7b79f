"""The kit's tests of grammar backends, on the template, which takes choices, and on broken ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import pytest
from fd_mygrammar.backend import MyGrammarBackend, MyGrammarMatcher
from tokenizers import Tokenizer

from fastdeploy_core.types import StructuredOutputsParams
from fastdeploy_testing.conformance.test_grammar import (
    EOS,
    VOCAB,
    GrammarConformance,
    make_tokenizer,
)

FAILURE = (AssertionError, pytest.fail.Exception)


class TestTemplate(GrammarConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> type[MyGrammarBackend]:
        return MyGrammarBackend


class LetsAllThrough(MyGrammarMatcher):
    def fits(self, tokens: Sequence[int]) -> bool:
        return True


class ShutsOut(MyGrammarMatcher):
    def fits(self, tokens: Sequence[int]) -> bool:
        return super().fits(tokens) and tokens[-1] % 7 != 3


class KeepsBits(MyGrammarMatcher):
    def fill_mask(self, mask: np.ndarray) -> None:
        whole = np.empty_like(mask)
        super().fill_mask(whole)
        mask |= whole


class TooWide(MyGrammarMatcher):
    def fill_mask(self, mask: np.ndarray) -> None:
        super().fill_mask(mask)
        mask.view(np.uint32)[VOCAB // 32] |= np.uint32(1 << 31)


class EmptyBehindTheEnd(MyGrammarMatcher):
    def fill_mask(self, mask: np.ndarray) -> None:
        super().fill_mask(mask)
        if self.is_finished():
            mask[:] = 0


class TakesAnything(MyGrammarMatcher):
    def accept(self, token_ids: Sequence[int]) -> int:
        self.tokens += token_ids
        return len(token_ids)


class TakesTheWrongOne(MyGrammarMatcher):
    def accept(self, token_ids: Sequence[int]) -> int:
        taken = super().accept(token_ids)
        self.tokens += token_ids[taken : taken + 1]
        return taken


class NeverGoesBack(MyGrammarMatcher):
    def rollback(self, num_tokens: int) -> None:
        pass


class GoesBackTooFar(MyGrammarMatcher):
    def rollback(self, num_tokens: int) -> None:
        super().rollback(min(num_tokens + 1, len(self.tokens)))


class Shared(MyGrammarMatcher):
    everyones: list[int] = []  # noqa: RUF012 - the fault

    def __init__(self, choices: list[str], spelled: list[str]) -> None:
        super().__init__(choices, spelled)
        self.tokens = self.everyones


class NeverFinished(MyGrammarMatcher):
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


@pytest.fixture(scope="module")
def tokenizer_json(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def run(
    tokenizer: Tokenizer, tokenizer_json: str, matcher: type[MyGrammarMatcher], test: str
) -> None:
    """One test of the suite on choices, walked by that matcher."""
    backend = MyGrammarBackend(tokenizer_json, VOCAB, [EOS])
    backend.matcher_class = matcher
    words = {"backend": backend, "kind": "choice", "tokenizer": tokenizer}
    method = getattr(GrammarConformance(), test)
    method(**{name: words[name] for name in signature(method).parameters})


@pytest.mark.parametrize(("matcher", "test"), BROKEN)
def test_broken_backends_fail(
    tokenizer: Tokenizer, tokenizer_json: str, matcher: type[MyGrammarMatcher], test: str
) -> None:
    run(tokenizer, tokenizer_json, MyGrammarMatcher, test)
    with pytest.raises(FAILURE):
        run(tokenizer, tokenizer_json, matcher, test)


def test_a_backend_that_fails_otherwise_than_by_refusing_is_found(tokenizer_json: str) -> None:
    class Crashes(MyGrammarBackend):
        def compile(self, params: StructuredOutputsParams, options: Mapping[str, Any]) -> bytes:
            raise ValueError("no")

    backend = Crashes(tokenizer_json, VOCAB, [EOS])
    suite = GrammarConformance()
    with pytest.raises(ValueError, match="no"):
        suite.test_a_constraint_that_cannot_be_is_refused(
            backend, StructuredOutputsParams(regex="[a-")
        )
