"""The families of fd-models through the real engine: tokens of transformers, in a batch, with
prompts in chunks and the prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy_testing.generate import sampled_tokens
from tests.checkpoints import FAMILY_LIMITS, NUM_GREEDY, build, reference
from tests.mxfp4_checkpoints import build_mxfp4

# One of each family.
VARIANTS = (
    *("mistral", "mixtral", "qwen2-moe", "olmo2", "phi3-longrope", "glm4-moe", "minimax-m2"),
    *("llama4", "deepseek-v32", "gemma2", "gemma3", "olmo3", "cohere2"),
)


# A step has at most 9 tokens.
ENGINE = {
    "max_tokens": NUM_GREEDY,
    "device": "cpu",
    "dtype": "float32",
    "block_size": 8,
    "max_num_batched_tokens": 9,
    "max_num_seqs": 4,
}


def check_engine(folder: Path, tensor_library: str, **limits: Any) -> None:
    """All prompts at once; then each alone, which finds its cache."""
    answers = reference(folder)
    prompts = [answer["prompt"].tolist() for answer in answers]
    options = {**ENGINE, "tensor_library": tensor_library, **limits}
    result = sampled_tokens(folder, prompts, [{}], **options)
    (run,) = result["runs"]
    expected = [answer["greedy"].tolist() for answer in answers]
    assert run["together"] == expected and run["alone"] == expected
    assert result["metrics"]["prefix_hit_tokens_total"] > 0, result["metrics"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("families"), [*VARIANTS, "deepseek"])


@pytest.mark.parametrize("variant", [*VARIANTS, "deepseek"])
def test_the_engine_gives_the_tokens_of_transformers(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    check_engine(checkpoints / variant, tensor_library, **FAMILY_LIMITS.get(variant, {}))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_experts_in_mxfp4_give_the_tokens_of_the_numbers_that_they_stand_for(
    tmp_path: Path, tensor_library: str, num_ranks: int
) -> None:
    packed, twin = build_mxfp4(tmp_path)
    prompts = [answer["prompt"].tolist() for answer in reference(twin)]
    options = {**ENGINE, "tensor_library": tensor_library}
    (found,) = sampled_tokens(packed, prompts, [{}], **options, tensor_parallel_size=num_ranks)[
        "runs"
    ]
    (wanted,) = sampled_tokens(twin, prompts, [{}], **options)["runs"]
    assert found == wanted and found["together"] == found["alone"]
