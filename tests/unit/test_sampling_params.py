"""Sampling parameters: what is bounded, and which spellings are numbers."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import SamplingParams


@pytest.mark.parametrize(
    "given",
    [
        {"bad_words": ["x" * 257]},
        {"bad_words": ["x"] * 129},
        {"bad_words": [""]},
        {"bad_words": [5]},
        {"bad_words_token_ids": [[1]] * 513},
        {"bad_words_token_ids": [[1] * (2**16 + 1)]},
        {"allowed_token_ids": [True]},
        {"allowed_token_ids": [1, -1]},
        {"allowed_token_ids": []},
        {"stop_token_ids": ["1"]},
    ],
)
def test_what_is_too_much_or_no_token_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**given)
    assert caught.value.param == next(iter(given))


@pytest.mark.parametrize("key", [" 5 ", "٣", "5.0", "+5", "-5", "5_0", "", "x", 5.0, True, -1])
def test_only_plain_digits_name_a_token(key: Any) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias={key: 1.0})


def test_plain_digits_and_numbers_name_a_token() -> None:
    assert SamplingParams(logit_bias={"5": 1, 6: 200.0}).logit_bias == {5: 1.0, 6: 100.0}


def test_bad_tokens_may_be_listed_as_the_original_does() -> None:
    given: Any = [5, [6, 7]]
    assert SamplingParams(bad_words_token_ids=given).bad_words_token_ids == [[5], [6, 7]]


def test_true_asks_for_one_alternative() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert type(params.logprobs) is int
