"""The families of fd-models against transformers, on checkpoints that transformers saved, in
float32; on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastdeploy_core.errors import UnsupportedModel
from tests.checkpoints import FAMILY_LIMITS, FAMILY_VARIANTS, NUM_GREEDY, build, reference
from tests.paged import PagedModel
from tests.parity import check_chunks_beside_a_decode, check_prompts_and_greedy, relative_error
from tests.tp_rank import run_ranks


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("families"), list(FAMILY_VARIANTS))


# Norms over heads of several ranks, of which two hold the same key head; a gated shared expert;
# joined weights in the checkpoint; a routing bias; norms stored as w - 1; sinks, and biases that
# are added once; experts whose input is scaled; an indexer that every rank has; branches whose
# sums over ranks are added to one input.
ON_TWO_RANKS = (
    *("olmo2", "qwen2-moe", "phi3", "minimax-m2", "gemma3", "gpt-oss", "llama4", "deepseek-v32"),
    *("cohere2", "hunyuan-moe"),
)
SLOW = ("phi3", "minimax-m2", "hunyuan-moe")  # divided as what the others have, too


@pytest.fixture(params=FAMILY_VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model_of(checkpoints: Path, variant: str, library: str) -> PagedModel:
    return PagedModel(checkpoints / variant, library, **FAMILY_LIMITS.get(variant, {}))


def test_prompt_logits_and_64_greedy_tokens_equal_transformers(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    model = model_of(checkpoints, variant, tensor_library)
    largest = check_prompts_and_greedy(model, reference(checkpoints / variant))
    print(f"{variant} on {tensor_library}: largest relative logit error {largest:.1e}")


def test_a_prompt_in_chunks_beside_a_decode_gives_the_same_logits(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    model = model_of(checkpoints, variant, tensor_library)
    check_chunks_beside_a_decode(model, reference(checkpoints / variant))


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[pytest.mark.slow] if v in SLOW else []) for v in ON_TWO_RANKS],
)
def test_two_ranks_equal_one(
    checkpoints: Path, variant: str, tensor_library: str, tmp_path: Path
) -> None:
    answers = reference(checkpoints / variant)
    prompts = {str(i): answer["prompt"].tolist() for i, answer in enumerate(answers)}
    for rank in run_ranks(
        checkpoints / variant, tensor_library, 2, tmp_path / "group", prompts, NUM_GREEDY
    ):
        assert relative_error(np.array(rank["logits"]), answers[0]["logits"][-1]) < 1e-4
        assert [rank["tokens"][n] for n in prompts] == [a["greedy"].tolist() for a in answers]


@pytest.mark.parametrize(
    ("variant", "field", "longest"),
    [("phi3-longrope", "longrope", 128)],
)
def test_a_context_that_cannot_be_exact_is_refused_with_the_one_that_can(
    checkpoints: Path, variant: str, field: str, longest: int, tensor_library: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"{field}.*--max-model-len {longest}$"):
        PagedModel(checkpoints / variant, tensor_library, max_model_len=longest + 1)
    PagedModel(checkpoints / variant, tensor_library, max_model_len=longest)
