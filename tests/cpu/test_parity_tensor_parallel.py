"""Two ranks in two processes compute what one rank computes, and both know the whole answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import NUM_GREEDY, build, reference
from tests.tp_rank import run_ranks

# One of each way to divide: biases with GQA, a replicated key-value head, experts with shared ones,
# latent attention with groups.
VARIANTS = ("llama", "qwen3", "ernie-moe", "deepseek", "deepseek-no-q-lora")
SLOW = ("llama", "deepseek-no-q-lora")  # divided as what the others have, too


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoints"), list(VARIANTS))


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[pytest.mark.slow] if v in SLOW else []) for v in VARIANTS],
)
def test_two_ranks_equal_one(
    checkpoints: Path, variant: str, tensor_library: str, tmp_path: Path
) -> None:
    answers = reference(checkpoints / variant)
    prompts = {str(i): a["prompt"].tolist() for i, a in enumerate(answers)}
    ranks = run_ranks(
        checkpoints / variant, tensor_library, 2, tmp_path / "group", prompts, NUM_GREEDY
    )
    expected = answers[0]["logits"]
    for rank in ranks:
        error = np.abs(np.array(rank["logits"]) - expected[-1]).max() / np.abs(expected).max()
        assert error < 1e-4
        assert [rank["tokens"][n] for n in prompts] == [a["greedy"].tolist() for a in answers]
    assert ranks[0]["logits"] == ranks[1]["logits"]  # not one bit may differ between ranks
