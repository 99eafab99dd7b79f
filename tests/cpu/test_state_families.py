"""Families whose layers keep states, against transformers, on checkpoints that transformers saved,
in float32; on one rank and on two, and through the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastdeploy_core.errors import UnsupportedModel
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_testing.generate import sampled_tokens
from tests.checkpoints import NUM_GREEDY, STATE_VARIANTS, build, reference
from tests.paged import PagedModel
from tests.parity import check_chunks_beside_a_decode, check_prompts_and_greedy, relative_error
from tests.tp_rank import run_ranks


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("states"), list(STATE_VARIANTS))


SLOW = ("qwen3-5", "qwen3-5-moe", "granite4-dense")  # made of parts that the others have, too
MARKED = [pytest.param(v, marks=[pytest.mark.slow] if v in SLOW else []) for v in STATE_VARIANTS]


@pytest.fixture(params=STATE_VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_prompt_logits_and_64_greedy_tokens_equal_transformers(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    model = PagedModel(checkpoints / variant, tensor_library)
    largest = check_prompts_and_greedy(model, reference(checkpoints / variant))
    print(f"{variant} on {tensor_library}: largest relative logit error {largest:.1e}")


def test_a_prompt_in_chunks_beside_a_decode_gives_the_same_logits(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    model = PagedModel(checkpoints / variant, tensor_library)
    check_chunks_beside_a_decode(model, reference(checkpoints / variant))


def test_what_transformers_decoded_gives_the_same_as_a_prompt(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    """A prompt longer than several chunks of the recurrence, whole and in uneven parts."""
    model = PagedModel(checkpoints / variant, tensor_library)
    answer = reference(checkpoints / variant)[1]
    greedy = answer["greedy"].tolist()
    text = answer["prompt"].tolist() + greedy[:-1]
    (whole,) = model.step([("whole", text)])
    assert whole[-len(greedy) :].argmax(-1).tolist() == greedy
    assert relative_error(whole[: len(answer["logits"])], answer["logits"]) < 1e-4
    parts = [
        model.step([("parts", text[a:b])])[0] for a, b in ((0, 3), (3, 4), (4, 45), (45, None))
    ]
    assert relative_error(np.concatenate(parts), whole) < 1e-4


@pytest.mark.parametrize("variant", MARKED)
def test_the_engine_gives_the_tokens_of_transformers(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    """All prompts at once, a step has at most 9 tokens; then each alone, which finds its state."""
    answers = reference(checkpoints / variant)
    result = sampled_tokens(
        checkpoints / variant,
        [answer["prompt"].tolist() for answer in answers],
        [{}],
        max_tokens=NUM_GREEDY,
        device="cpu",
        dtype="float32",
        tensor_library=tensor_library,
        block_size=8,
        max_num_batched_tokens=9,
        max_num_seqs=4,
    )
    (run,) = result["runs"]
    expected = [answer["greedy"].tolist() for answer in answers]
    assert run["together"] == expected and run["alone"] == expected
    assert result["metrics"]["prefix_hit_tokens_total"] > 0, result["metrics"]


# Rows in groups by key head; rows in plain order; convolutions alone.
ON_TWO_RANKS = (
    "qwen3-next",
    *(pytest.param(v, marks=pytest.mark.slow) for v in ("qwen3-5", "lfm2")),
)


@pytest.mark.parametrize("divided", ON_TWO_RANKS)
def test_two_ranks_equal_one(
    checkpoints: Path, divided: str, tensor_library: str, tmp_path: Path
) -> None:
    answers = reference(checkpoints / divided)
    prompts = {str(i): answer["prompt"].tolist() for i, answer in enumerate(answers)}
    for rank in run_ranks(
        checkpoints / divided, tensor_library, 2, tmp_path / "group", prompts, NUM_GREEDY
    ):
        assert relative_error(np.array(rank["logits"]), answers[0]["logits"][-1]) < 1e-4
        assert [rank["tokens"][n] for n in prompts] == [a["greedy"].tolist() for a in answers]


def test_granite_on_two_ranks_is_refused_with_what_is_possible() -> None:
    config = {"architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 64}
    with pytest.raises(UnsupportedModel, match="possible: --tensor-parallel-size 1"):
        read_shapes(config, 2)
