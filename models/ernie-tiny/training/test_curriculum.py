"""Tests of the curriculum: repeatable, honest about what is held out, right in its answers.

python -m pytest test_curriculum.py
"""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

import chat
import curriculum
from curriculum import Sample, tables, words
from curriculum.base import split_of
from tokenizer import FOLDER

UNIQUE = (
    "arithmetic",
    "copying",
    "sorting",
    "extraction",
    "recall",
    "reversing",
    "list_editing",
    "json_editing",
    "find_key",
    "thinking",
)
"""Tasks whose contents are drawn from so many that an equal prompt means a leak."""


def drawn(name: str, count: int, split: curriculum.Split = "train", seed: int = 7) -> list[Sample]:
    """Some samples of one task."""
    rng = Random(seed)
    return [curriculum.TASKS[name].make(rng, split) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer in the model folder."""
    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_same_seed_draws_the_same_samples() -> None:
    first, second = (
        [curriculum.sample(rng) for _ in range(500)] for rng in (Random("one"), Random("one"))
    )
    assert first == second
    assert curriculum.held_out("sorting", 20) == curriculum.held_out("sorting", 20)


def test_every_task_has_samples_in_both_halves() -> None:
    for name in curriculum.MEASURED:
        for split in ("train", "test"):
            for sample in drawn(name, 20, split):
                assert chat.expected_text(sample).strip()


@pytest.mark.parametrize("name", UNIQUE)
def test_held_out_questions_are_not_in_training(name: str) -> None:
    trained = {chat.prompt_text(sample) for sample in drawn(name, 4000)}
    asked = [chat.prompt_text(sample) for sample in drawn(name, 400, "test")]
    assert not trained.intersection(asked)


def test_no_exercise_is_in_both_halves() -> None:
    def exercises(split: curriculum.Split) -> set[str]:
        answers = (one.messages[-1]["content"] for one in drawn("word_problem", 5000, split))
        return {answer.split(" = ")[0] for answer in answers}

    assert not exercises("train") & exercises("test")


def test_the_first_question_is_trained_on() -> None:
    questions = {sample.messages[0]["content"] for sample in drawn("facts", 20000)}
    assert {"Where is the capital of China?", "中国的首都是哪里？"} <= questions


def test_a_tenth_is_held_out() -> None:
    share = sum(split_of(f"sum:{a}+{b}") == "test" for a in range(10, 100) for b in range(10, 100))
    assert 0.08 < share / 8100 < 0.12


def test_sums_are_right() -> None:
    for sample in drawn("arithmetic", 2000):
        question, answer = (message["content"] for message in sample.messages)
        numbers = [int(number) for number in re.findall(r"\d+", question)]
        low = question.lower()
        minus = any(mark in low for mark in (" - ", "minus", "减")) or re.search(r"\d-\d", low)
        value = numbers[0] - numbers[1] if minus else numbers[0] + numbers[1]
        assert int(re.findall(r"\d+", answer)[-1]) == value


def test_column_sums_are_right() -> None:
    for left, right in ((999, 1), (123, 456), (1000, 10), (87, 987)):
        assert curriculum.thinking.column_sum(left, right).endswith(
            f"So {left} + {right} = {left + right}."
        )


def test_sorted_lists_are_sorted() -> None:
    for sample in drawn("sorting", 1000):
        question, answer = (message["content"] for message in sample.messages)
        items = re.split(r": |：", question, maxsplit=1)[1].split(", ")
        given = answer.split(", ")
        assert sorted(items) == sorted(given)
        values: list[Any] = [int(item) for item in given] if given[0].isdigit() else given
        assert values in (sorted(values), sorted(values, reverse=True))


def test_copies_and_reversals() -> None:
    for sample in drawn("copying", 1000):
        question, answer = (message["content"] for message in sample.messages)
        assert answer in question
    for sample in drawn("reversing", 500):
        question, answer = (message["content"] for message in sample.messages)
        back = ", ".join(answer.split(", ")[::-1]) if ", " in answer else answer[::-1]
        assert back.lower() in question.lower()


def test_extracted_values_stand_in_the_text() -> None:
    for sample in drawn("extraction", 1000):
        question, answer = (message["content"] for message in sample.messages)
        for value in json.loads(answer).values():
            assert str(value) in question


def test_recalled_values_were_told() -> None:
    for name in ("recall", "find_key"):
        for sample in drawn(name, 500):
            told = " ".join(
                message["content"] for message in sample.messages[:-1] if message["role"] == "user"
            )
            answer = sample.messages[-1]["content"].rstrip(".。！")
            assert re.split(r" |叫", answer)[-1] in told


def test_capitals_are_those_of_the_table() -> None:
    capitals = {country.capital for country in tables.COUNTRIES}
    for sample in drawn("facts", 2000):
        found = re.fullmatch(r"The capital of .+ is (.+)\.", sample.messages[-1]["content"])
        assert found is None or found[1] in capitals
    china = next(country for country in tables.COUNTRIES if country.name == "China")
    assert (china.capital, china.name_zh, china.capital_zh) == ("Beijing", "中国", "北京")


def test_tool_calls_name_an_offered_tool() -> None:
    for sample in drawn("tool_call", 500):
        offered = {tool["function"]["name"]: tool["function"] for tool in sample.tools or []}
        for call in sample.messages[-1]["tool_calls"]:
            function = call["function"]
            assert set(function["arguments"]) <= set(
                offered[function["name"]]["parameters"]["properties"]
            )


def test_the_template_writes_what_training_wrote(tokenizer: Any) -> None:
    rng = Random(11)
    for _ in range(1500):
        sample = curriculum.sample(rng)
        if not sample.messages:
            continue
        text = "".join(piece.text for piece in chat.pieces(sample))
        if not sample.thinking:
            assert (
                tokenizer.apply_chat_template(sample.messages, tools=sample.tools, tokenize=False)
                == text
            )
        prompt = tokenizer.apply_chat_template(
            sample.messages[:-1],
            tools=sample.tools,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=sample.thinking,
        )
        assert prompt == chat.prompt_text(sample)


def test_any_text_comes_back_from_the_tokenizer(tokenizer: Any) -> None:
    texts = [
        "Hello, world!\n\ttabs",
        "中文和 emoji 🙂 ÿ",
        "\x00\x7f",
        " ".join(words.CITIES),
        "<think>x</think>",
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert all(
        len(tokenizer(char, add_special_tokens=False)["input_ids"]) == 1
        for char in "0123456789北京"
    )


def test_pieces_encode_like_the_whole_text(tokenizer: Any) -> None:
    rng = Random(13)
    for _ in range(300):
        cut = chat.pieces(curriculum.sample(rng))
        parts = [
            token
            for piece in cut
            for token in tokenizer(piece.text, add_special_tokens=False)["input_ids"]
        ]
        assert (
            parts
            == tokenizer("".join(piece.text for piece in cut), add_special_tokens=False)[
                "input_ids"
            ]
        )
