"""LLM.beam_search against transformers' generate(num_beams=...): same sequences, same scores."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fd_beam_search import BeamSearchParams
from oracle import ask

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.errors import InvalidRequest
from tests import checkpoints
from tests.server_process import REPOSITORY

DEMO = REPOSITORY / "models" / "ernie-tiny"
ROOM = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 192, "block_size": 16}
QUESTIONS = [
    "The capital of China is",
    "<|im_start|>user\nWhere is the capital of China?<|im_end|>\n<|im_start|>assistant\n",
    "A star is",
]


def _same(llm: LLM, model: Path, cases: list[dict[str, Any]]) -> None:
    wanted = ask(model, cases)
    for case, answer in zip(cases, wanted, strict=True):
        params = BeamSearchParams(
            beam_width=case["width"],
            max_tokens=case["max_tokens"],
            ignore_eos=True,
            stop_token_ids=case["stop_ids"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
        )
        (found,) = llm.beam_search([case["prompt"]], params)
        start = len(case["prompt"])
        assert [s.tokens[start:] for s in found.sequences] == [tokens for tokens, _ in answer], case
        scores = [sequence.score for sequence in found.sequences]
        assert scores == pytest.approx([score for _, score in answer], abs=1e-4), case
        for sequence in found.sequences:
            told = [
                position[token].logprob
                for position, token in zip(sequence.logprobs, sequence.tokens[start:], strict=True)
            ]
            assert sequence.cum_logprob == pytest.approx(sum(told), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "num_cases"),
    [
        ("llama", 4),
        pytest.param("llama", 24, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", 8, marks=pytest.mark.slow),
    ],
)
def test_random_models_and_mixes(name: str, num_cases: int, tmp_path: Path, fd_tensor: str) -> None:
    """With tokens that end a text often enough that every rule of the search decides something."""
    model = checkpoints.build(tmp_path, [name]) / name
    chance = random.Random(7)
    cases = [
        {
            "prompt": [
                chance.randrange(3, checkpoints.VOCAB) for _ in range(chance.randrange(1, 40))
            ],
            "width": chance.randrange(2, 7),
            "max_tokens": chance.randrange(1, 14),
            "length_penalty": chance.choice([1.0, 1.0, 0.0, 0.6, 2.5, -1.0]),
            "early_stopping": chance.choice([False, False, True, "never"]),
            "stop_ids": sorted(
                chance.sample(range(3, checkpoints.VOCAB), chance.choice([1, 3, 12]))
            ),
        }
        for _ in range(num_cases)
    ]
    with LLM(
        model, skip_tokenizer_init=True, tensor_library=fd_tensor, max_logprobs=-1, **ROOM
    ) as llm:
        _same(llm, model, cases)


def test_demo_model(fd_tensor: str) -> None:
    with LLM(DEMO, tensor_library=fd_tensor, **ROOM) as llm:
        tokenizer = llm.get_tokenizer()
        cases = [
            {
                "prompt": tokenizer.encode(question),
                "width": 4,
                "max_tokens": 12,
                "length_penalty": penalty,
                "early_stopping": False,
                "stop_ids": [4, 2],
            }
            for question in QUESTIONS
            for penalty in (1.0, 0.0)
        ]
        _same(llm, DEMO, cases)
        together = llm.beam_search(QUESTIONS, BeamSearchParams(beam_width=4, max_tokens=12))
        for question, found in zip(QUESTIONS, together, strict=True):
            (alone,) = llm.beam_search(question, BeamSearchParams(beam_width=4, max_tokens=12))
            assert [s.tokens for s in found.sequences] == [s.tokens for s in alone.sequences]
        assert "Beijing" in (together[0].sequences[0].text or "")
        greedy = llm.generate(QUESTIONS[0], SamplingParams(temperature=0, max_tokens=12))[0]
        (one,) = llm.beam_search(QUESTIONS[0], BeamSearchParams(beam_width=1, max_tokens=12))
        assert one.sequences[0].tokens == [*greedy.prompt_token_ids, *greedy.outputs[0].token_ids]


def test_what_cannot_be(fd_tensor: str) -> None:
    with pytest.raises(InvalidRequest, match="beam_width"):
        BeamSearchParams(beam_width=0)
    with pytest.raises(InvalidRequest, match="early_stopping"):
        BeamSearchParams(beam_width=2, early_stopping="sometimes")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="length_penalty"):
        BeamSearchParams(beam_width=2, length_penalty=float("nan"))
    with (
        LLM(DEMO, tensor_library=fd_tensor, logprobs_mode="raw_logits", **ROOM) as llm,
        pytest.raises(InvalidRequest, match="raw_logits"),
    ):
        llm.beam_search("a", BeamSearchParams(beam_width=2))
    with (
        LLM(DEMO, tensor_library=fd_tensor, max_logprobs=4, **ROOM) as llm,
        pytest.raises(InvalidRequest, match="--max-logprobs"),
    ):
        llm.beam_search("a", BeamSearchParams(beam_width=4))
