"""Prompts and parameters become complete requests, or are refused before the engine sees them."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_core.engine.input import (
    RequestLimits,
    RequestOptions,
    Truncation,
    bad_word_ids,
    build_request,
    default_sampling_values,
)
from fastdeploy_core.errors import ConfigError, InvalidRequest, RequestTooLong
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.types import SamplingParams
from tests import tokenizer_files

PRIORITY = RequestOptions(priority=3)
LIMITS = RequestLimits(max_model_len=20, vocab_size=500, eos_token_ids=(1, 4))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tokenizer_files.write(tmp_path_factory.mktemp("tokenizer"), "byte_level_with_bos")
    return Tokenizer.load(folder)


def build(tokenizer: Tokenizer | None, prompt: Any, **sampling: Any) -> Any:
    return build_request(
        prompt, SamplingParams(**sampling), tokenizer=tokenizer, limits=LIMITS, options=PRIORITY
    )


def test_a_request_is_complete(tokenizer: Tokenizer) -> None:
    request = build(tokenizer, "hello")
    assert request.prompt_token_ids == [0, *tokenizer.encode("hello", add_special_tokens=False)]
    assert request.eos_token_ids == [1, 4]
    assert request.priority == 3
    assert request.arrival_time_s > 0
    assert 0 <= request.sampling.seed < 2**63
    other = build(tokenizer, "hello")
    assert other.request_id != request.request_id
    assert other.sampling.seed != request.sampling.seed
    assert build(tokenizer, "hello", seed=5).sampling.seed == 5


def test_special_tokens_are_added_only_when_asked(tokenizer: Tokenizer) -> None:
    request = build_request(
        "<s>hi",
        SamplingParams(),
        tokenizer=tokenizer,
        limits=LIMITS,
        options=RequestOptions(add_special_tokens=False),
    )
    assert request.prompt_token_ids.count(0) == 1


def test_max_tokens_is_what_is_left(tokenizer: Tokenizer) -> None:
    prompt = list(range(5, 17))
    assert build(tokenizer, prompt, max_tokens=None).sampling.max_tokens == 8
    assert build(tokenizer, prompt, max_tokens=100, min_tokens=50).sampling.max_tokens == 8
    assert build(tokenizer, prompt, max_tokens=100, min_tokens=50).sampling.min_tokens == 8
    assert build(tokenizer, prompt, max_tokens=3).sampling.max_tokens == 3


def test_the_callers_parameters_are_not_changed(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=100, bad_words=["hello"])
    build_request("x", params, tokenizer=tokenizer, limits=LIMITS)
    assert params == SamplingParams(max_tokens=100, bad_words=["hello"])


def test_a_prompt_without_room_for_an_answer_is_too_long(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        RequestTooLong,
        match=r"This model's maximum context length is 20 tokens\. "
        r"However, your prompt contains 20",
    ):
        build(tokenizer, list(range(20)))
    assert build(tokenizer, list(range(20)), max_tokens=0).sampling.max_tokens == 0
    with pytest.raises(RequestTooLong):
        build(tokenizer, list(range(21)), max_tokens=0)


@pytest.mark.parametrize("prompt", ["", [], [500], [-1], [True], [1.0], ["a"], [2**70], "a\ud800"])
def test_impossible_prompts_are_refused(tokenizer: Tokenizer, prompt: Any) -> None:
    # Empty text too, although this tokenizer would add <s> to it.
    with pytest.raises(InvalidRequest):
        build(tokenizer, prompt)


def test_text_whose_tokens_the_model_has_no_embedding_for_is_refused(
    tokenizer: Tokenizer,
) -> None:
    narrow = RequestLimits(max_model_len=20, vocab_size=50)
    with pytest.raises(InvalidRequest, match="out of vocabulary"):
        build_request("hello", SamplingParams(), tokenizer=tokenizer, limits=narrow)


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"stop_token_ids": [500]},
        {"logit_bias": {500: 1.0}},
        {"allowed_token_ids": [7, 2**40]},
        {"bad_words_token_ids": [[3, 500]]},
    ],
)
def test_parameters_beyond_the_engines_limits_are_refused(
    tokenizer: Tokenizer, sampling: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(tokenizer, "x", **sampling)
    assert caught.value.param == next(iter(sampling))


def test_a_text_prompt_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        build(None, "hello")
    assert build(None, [3]).prompt_token_ids == [3]


def test_bad_words_are_banned_at_the_start_and_after_a_space(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("hello", add_special_tokens=False)
    spaced = tokenizer.encode(" hello", add_special_tokens=False)
    request = build(tokenizer, "x", bad_words=["hello"], bad_words_token_ids=[[7]])
    assert request.sampling.bad_words_token_ids == [[7], plain, spaced]
    assert bad_word_ids(["!"], tokenizer)[0] == tokenizer.encode("!", add_special_tokens=False)


@pytest.mark.parametrize("salt", ["a" * 129, "a@b", "a\\b", "a\0b"])
def test_cache_salts_are_checked(tokenizer: Tokenizer, salt: str) -> None:
    with pytest.raises(InvalidRequest, match="cache_salt"):
        salted(tokenizer, cache_salt=salt)


def salted(tokenizer: Tokenizer, **options: Any) -> str:
    given = RequestOptions(**options)
    params = SamplingParams()
    return build_request("x", params, tokenizer=tokenizer, limits=LIMITS, options=given).cache_salt


def test_a_scope_and_a_salt_are_told_apart_from_every_other_salt(tokenizer: Tokenizer) -> None:
    longest = "a+/=" * 32  # as base64 writes it
    options = [
        {},
        {"cache_salt": "s"},
        {"cache_salt": longest},
        {"salt_scope": "one"},
        {"salt_scope": "two"},
        {"salt_scope": "one", "cache_salt": "s"},
        {"salt_scope": "one", "cache_salt": longest},
    ]
    salts = [salted(tokenizer, **each) for each in options]
    assert len(set(salts)) == len(options)
    assert salts[:2] == ["", "s"]


class Counting(Tokenizer):
    """Counts the characters that are tokenized."""

    num_chars = 0

    def encode_batch(self, texts: Any, add_special_tokens: bool = True) -> list[list[int]]:
        Counting.num_chars += sum(map(len, texts))
        return super().encode_batch(texts, add_special_tokens)


@pytest.mark.parametrize("side", ["left", "right", None])
def test_a_text_that_is_cut_or_refused_costs_about_as_much_as_one_that_fits(
    tokenizer: Tokenizer, side: Any
) -> None:
    limits = RequestLimits(max_model_len=5000, vocab_size=500)
    counting = Counting.load(tokenizer.path)
    Counting.num_chars = 0
    whole = "".join(f"{number} lazy dogs, " for number in range(15_000))
    cut = None if side is None else Truncation(-1, side)
    options = RequestOptions(truncation=cut)
    if cut is None:
        with pytest.raises(RequestTooLong, match="maximum context length is 5000"):
            build_request(
                whole, SamplingParams(), tokenizer=counting, limits=limits, options=options
            )
    else:
        kept = build_request(
            whole, SamplingParams(), tokenizer=counting, limits=limits, options=options
        )
        ids = tokenizer.encode(whole)
        room = 5000 - 16
        assert kept.prompt_token_ids == (ids[-room:] if side == "left" else ids[:room])
    assert 0 < Counting.num_chars < len(whole) * 0.6


def test_a_text_with_few_tokens_is_bounded_as_well(tokenizer: Tokenizer) -> None:
    counting = Counting.load(tokenizer.path)
    limits = RequestLimits(max_model_len=10_000_000 // 16, vocab_size=500)
    Counting.num_chars = 0
    text = "x" * 10_000_001
    with pytest.raises(RequestTooLong, match="10000001 characters; at most 10000000"):
        build_request(text, SamplingParams(), tokenizer=counting, limits=limits)
    assert Counting.num_chars == 0


def test_the_whole_vocabulary_is_given_where_the_limit_allows_as_many(
    tokenizer: Tokenizer,
) -> None:
    for most, possible in ((499, False), (500, True), (-1, True)):
        limits = RequestLimits(max_model_len=20, vocab_size=500, max_logprobs=most)
        for name in ("logprobs", "prompt_logprobs"):
            params = SamplingParams(**{name: -1})
            if possible:
                request = build_request("x", params, tokenizer=tokenizer, limits=limits)
                assert getattr(request.sampling, name) == -1
            else:
                with pytest.raises(InvalidRequest, match=f"between 0 and {most}"):
                    build_request("x", params, tokenizer=tokenizer, limits=limits)


def test_defaults_come_from_the_generation_config() -> None:
    config = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "do_sample": True, "foo": 1}
    values = default_sampling_values(config)
    assert values == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert default_sampling_values({}) == {"max_tokens": None}
    assert default_sampling_values({"do_sample": False, "temperature": 0.6})["temperature"] == 0.0
    with pytest.raises(ConfigError, match=r"generation_config\.json.*temperature must be a number"):
        default_sampling_values({"temperature": "hot"})
