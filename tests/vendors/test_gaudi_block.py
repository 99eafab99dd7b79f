"""Whole attention blocks by one driver: Gaudi's fused operators include the projections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdeploy_core.models.shapes import read_shapes
from tests.checkpoints import NUM_GREEDY, build, reference
from tests.vendors.engines import engine, greedy
from tests.vendors.gaudi_operators import GaudiOperators

BLOCK_SIZE = 128


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("blocks"), ["llama", "ernie-moe", "qwen3"])


@pytest.mark.parametrize("name", ["llama", pytest.param("ernie-moe", marks=pytest.mark.slow)])
def test_tokens_equal_transformers_through_fused_blocks(
    panels: Path, checkpoints: Path, name: str
) -> None:
    """With biases around attention, both styles of rotation, prompts beside each other, and
    padding."""
    from fd_gaudi.operators import OPERATORS
    from fd_simdevice.stand_in import standing_in

    folder = checkpoints / name
    config = json.loads((folder / "config.json").read_text())
    spec = read_shapes(config, 1).layers[0]
    operators = GaudiOperators(spec, config["hidden_size"], BLOCK_SIZE)
    answers = reference(folder)
    num_tokens = NUM_GREEDY // 2  # the stand-ins are slow
    with standing_in(OPERATORS, operators), engine(folder, "gaudi") as running:
        warm = set(operators.shapes)
        tokens = greedy(running, [a["prompt"].tolist() for a in answers], num_tokens)
        # After a prefix that is cached already, and in parts.
        again = greedy(running, [answers[1]["prompt"].tolist()], 4)
        report = running.info.drivers["attention"]
    assert tokens == [a["greedy"].tolist()[:num_tokens] for a in answers]
    assert again == [answers[1]["greedy"].tolist()[:4]]
    assert report == "gaudi_block"
    assert operators.calls["prompts"] and operators.calls["decodes"]
    assert operators.shapes == warm, "a shape was met while serving"


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [("qwen3", {}, "heads that are normalised"), ("llama", {"quantization": "wint8"}, "quantized")],
)
def test_blocks_it_cannot_run_go_to_another_driver(
    panels: Path, checkpoints: Path, name: str, options: dict[str, str], word: str
) -> None:
    from fd_gaudi.operators import OPERATORS
    from fd_simdevice.stand_in import standing_in

    config = json.loads((checkpoints / name / "config.json").read_text())
    spec = read_shapes(config, 1).layers[0]
    operators = GaudiOperators(spec, config["hidden_size"], BLOCK_SIZE)
    with (
        standing_in(OPERATORS, operators),
        engine(checkpoints / name, "gaudi", **options) as running,
    ):
        assert running.info.drivers["attention"] == "reference"
        assert "decodes" not in operators.calls
    from fd_gaudi.operators import answer_attention

    from fastdeploy_core.contracts.attention import AttentionQuestion
    from fastdeploy_core.contracts.base import Decline

    question = AttentionQuestion("gaudi", "paddle", spec, BLOCK_SIZE, "auto", not options)
    verdict = answer_attention(question).verdict
    assert isinstance(verdict, Decline) and word in verdict.reason
