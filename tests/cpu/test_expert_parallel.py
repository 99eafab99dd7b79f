"""Ranks that divide the experts compute what one rank computes, whether tokens travel or not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fd_scale_out.experts import ExpertRanks

from fastdeploy_core.cli.main import main
from fastdeploy_core.errors import ConfigError
from fastdeploy_testing.generate import greedy_tokens
from fastdeploy_testing.tiny_model import write_tiny_model
from tests.checkpoints import NUM_GREEDY, build, reference
from tests.tp_rank import run_ranks


@pytest.mark.parametrize(
    ("variant", "experts"),
    [
        ("qwen3-moe", "all_gather"),
        *(
            pytest.param(variant, experts, marks=pytest.mark.slow)
            for variant, experts in (
                ("qwen3-moe", "in place"),
                ("ernie-moe", "in place"),  # with shared experts and a correction bias
                ("ernie-moe", "all_gather"),
                ("deepseek", "in place"),  # sigmoid routing with groups
                ("deepseek", "all_gather"),
            )
        ),
    ],
)
def test_two_ranks_equal_one(
    variant: str, experts: str, tensor_library: str, tmp_path: Path
) -> None:
    folder = build(tmp_path / "checkpoints", [variant]) / variant
    answers = reference(folder)
    prompts = {str(i): a["prompt"].tolist() for i, a in enumerate(answers)}
    group = tmp_path / "group"
    ranks = run_ranks(folder, tensor_library, 2, group, prompts, NUM_GREEDY, experts)
    expected = answers[0]["logits"]
    for rank in ranks:
        error = np.abs(np.array(rank["logits"]) - expected[-1]).max() / np.abs(expected).max()
        assert error < 1e-4
        assert [rank["tokens"][n] for n in prompts] == [a["greedy"].tolist() for a in answers]
    assert ranks[0]["logits"] == ranks[1]["logits"]  # not one bit may differ between ranks


@pytest.mark.parametrize(
    ("variant", "experts"),
    [
        ("qwen3-moe", "in place"),
        *(
            pytest.param(variant, experts, marks=pytest.mark.slow)
            for variant in ("qwen3-moe", "ernie-moe", "deepseek")
            for experts in ("in place", "all_gather")
            if (variant, experts) != ("qwen3-moe", "in place")
        ),
    ],
)
def test_experts_move_between_steps_and_no_token_changes(
    variant: str, experts: str, tensor_library: str, tmp_path: Path
) -> None:
    """Several times while the prompts' answers are being written, each time on both ranks before
    the same step."""
    folder = build(tmp_path / "checkpoints", [variant]) / variant
    answers = reference(folder)
    prompts = {str(i): a["prompt"].tolist() for i, a in enumerate(answers)}
    group = tmp_path / "group"
    ranks = run_ranks(folder, tensor_library, 2, group, prompts, NUM_GREEDY, f"{experts} eplb")
    expected = answers[0]["logits"]
    assert ranks[0]["versions"] == ranks[1]["versions"]
    assert sum(ranks[0]["versions"]) >= 2
    for rank in ranks:
        error = np.abs(np.array(rank["logits"]) - expected[-1]).max() / np.abs(expected).max()
        assert error < 1e-4
        assert [rank["tokens"][n] for n in prompts] == [a["greedy"].tolist() for a in answers]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"quantization": "wint8"}, marks=pytest.mark.slow),
        pytest.param(
            {"enable_eplb": True, "eplb_config": {"step_interval": 3}}, marks=pytest.mark.slow
        ),
    ],
)
def test_an_engine_with_divided_experts_answers_as_one_rank_does(
    settings: dict[str, Any], tensor_library: str, tmp_path: Path
) -> None:
    """Prompts travel by the communicator that negotiation chose, decode steps are computed in
    place. Quantized experts are whole on their rank, so they hold the same numbers; quantized
    attention is divided and rounded part by part, for which one of the prompts is too near a
    tie."""
    model = write_tiny_model(tmp_path / "model")
    prompts = [[5, 9, 3, 7, 11, 30, 8], [4], [17, 18, 19, 20, 21, 22, 23, 24, 25, 26]]
    args = {"device": "cpu", "tensor_library": tensor_library, "max_num_seqs": 4}
    if "quantization" in settings:
        prompts, args = prompts[::2], args | settings
    alone = greedy_tokens(model, prompts, max_tokens=12, **args)
    divided = greedy_tokens(
        model,
        prompts,
        max_tokens=12,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        expert_communicator="auto",
        **args | settings,
    )
    assert divided == alone


def test_experts_that_ranks_cannot_divide_are_refused() -> None:
    group = SimpleNamespace(rank=0, world_size=3)
    with pytest.raises(ConfigError, match="64 experts cannot be divided over 3 ranks"):
        ExpertRanks(SimpleNamespace(), group).share(64)


def test_the_choice_of_a_communicator_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "why", "expert_communicator", "--device", "cpu", "--json"]) == 0
    (decision,) = json.loads(capsys.readouterr().out)["decisions"]
    answers = {row["name"]: row["accepted"] for row in decision["candidates"]}
    assert decision["winner"] == "all_gather" and answers["loopback"] is False
