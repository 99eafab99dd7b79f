"""However requests with adapters and without are batched, cut, cached, preempted and drafted for,
their tokens are those of each one alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import ask, engine, lora, tokens_of

from fastdeploy_core.types import SamplingParams

pytestmark = pytest.mark.slow
NAMES = [None, "some", "all", "mixed", "regex"]
NUM_MIXES = 200
SETTINGS: dict[str, dict[str, Any]] = {
    "all in slots": {"max_loras": 4, "max_num_seqs": 8},
    "fewer slots than adapters, cut and preempted": {
        "max_loras": 2, "max_cpu_loras": 3, "max_num_seqs": 8, "max_num_batched_tokens": 13,
        "num_gpu_blocks_override": 13,
    },
    "one slot, drafts": {
        "max_loras": 1, "max_num_seqs": 4,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    },
}  # fmt: skip


def requests(number: int) -> list[tuple[list[int], str | None, SamplingParams]]:
    """Prompts of few beginnings, so that the prefix cache would mix adapters up if it could."""
    draw, found = random.Random(3), []
    beginnings = [[draw.randrange(3, 131) for _ in range(length)] for length in (8, 16, 24)]
    for _ in range(number):
        prompt = [
            *draw.choice(beginnings),
            *(draw.randrange(3, 131) for _ in range(draw.randrange(4))),
        ]
        greedy = {"temperature": 0.0} if draw.random() < 0.7 else {"seed": draw.randrange(99)}
        # Some long ones, of which two do not fit into 13 blocks.
        count = 48 if draw.random() < 0.15 else draw.randrange(1, 13)
        params = SamplingParams(max_tokens=count, ignore_eos=True, **greedy)
        found.append((prompt, draw.choice(NAMES), params))
    return found


@pytest.fixture(scope="module")
def folder(made: Callable[[str], Path]) -> Path:
    return made("llama")


@pytest.fixture(scope="module")
def alone(folder: Path, fd_tensor: str) -> list[list[int]]:
    """Tokens of each request by itself, without any cache."""
    settings = {"max_loras": 4, "max_num_seqs": 1, "enable_prefix_caching": False}
    with engine(folder / "llama", fd_tensor, **settings) as llm:
        outputs = []
        for prompt, name, params in requests(NUM_MIXES):
            outputs += ask(llm, [prompt], [lora(folder, name)], params)
        return tokens_of(outputs)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_each_request_alone(
    folder: Path, fd_tensor: str, alone: list[list[int]], name: str
) -> None:
    asked = requests(NUM_MIXES)
    with engine(folder / "llama", fd_tensor, **SETTINGS[name]) as llm:
        prompts, names, params = zip(*asked, strict=True)
        adapters = [lora(folder, each) for each in names]
        found = tokens_of(ask(llm, prompts, adapters, list(params)))
        metrics = llm.get_metrics()
    assert found == alone
    assert metrics["prefix_hit_tokens_total"] > 0
    if "preempted" in name:
        assert metrics["preemptions_total"] > 0


def test_adapters_change_the_answer(alone: list[list[int]]) -> None:
    """The comparison above could see a mistake: equal greedy prompts with other adapters differ."""
    by_prompt: dict[tuple[int, ...], dict[str | None, list[int]]] = {}
    for (prompt, name, params), tokens in zip(requests(NUM_MIXES), alone, strict=True):
        if params.temperature == 0.0 and len(tokens) > 4:
            by_prompt.setdefault(tuple(prompt), {})[name] = tokens[:5]
    several = [list(answers.values()) for answers in by_prompt.values() if len(answers) > 1]
    assert several
    assert all(answers[0] != other for answers in several for other in answers[1:])
