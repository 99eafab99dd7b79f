"""The families of fd-models through the real engine: tokens of transformers, in a batch, with
prompts in chunks and the prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy_testing.generate import sampled_tokens
from tests.checkpoints import FAMILY_LIMITS, NUM_GREEDY, build, reference

# One of each family.
VARIANTS = (
    *("mistral", "mixtral", "qwen2-moe", "olmo2", "phi3-longrope", "glm4-moe", "minimax-m2"),
    *("llama4", "deepseek-v32"),
)


def check_engine(folder: Path, tensor_library: str, **limits: Any) -> None:
    """All prompts at once, a step has at most 9 tokens; then each alone, which finds its cache."""
    answers = reference(folder)
    result = sampled_tokens(
        folder,
        [answer["prompt"].tolist() for answer in answers],
        [{}],
        max_tokens=NUM_GREEDY,
        device="cpu",
        dtype="float32",
        tensor_library=tensor_library,
        block_size=8,
        max_num_batched_tokens=9,
        max_num_seqs=4,
        **limits,
    )
    (run,) = result["runs"]
    expected = [answer["greedy"].tolist() for answer in answers]
    assert run["together"] == expected and run["alone"] == expected
    assert result["metrics"]["prefix_hit_tokens_total"] > 0, result["metrics"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("families"), list(VARIANTS))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_gives_the_tokens_of_transformers(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    check_engine(checkpoints / variant, tensor_library, **FAMILY_LIMITS.get(variant, {}))
