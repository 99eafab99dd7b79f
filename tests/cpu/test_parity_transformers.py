"""Every architecture against transformers, on checkpoints that transformers saved, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastdeploy_core.tensor import load
from tests.checkpoints import NUM_GREEDY, VARIANTS, build, paddle_copy, reference
from tests.paged import PagedModel
from tests.parity import check_chunks_beside_a_decode, check_prompts_and_greedy


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_logits_and_64_greedy_tokens_equal_transformers(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    model = PagedModel(checkpoints / variant, tensor_library)
    largest = check_prompts_and_greedy(model, reference(checkpoints / variant))
    print(f"{variant} on {tensor_library}: largest relative logit error {largest:.1e}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_in_chunks_beside_a_decode_gives_the_same_logits(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    model = PagedModel(checkpoints / variant, tensor_library)
    check_chunks_beside_a_decode(model, reference(checkpoints / variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_paddle_layout_copy_gives_the_same_tokens(
    checkpoints: Path, variant: str, tensor_library: str, tmp_path: Path
) -> None:
    copy = paddle_copy(
        checkpoints / variant, tmp_path / "copy", ernie_names=variant.startswith("ernie")
    )
    answer = reference(checkpoints / variant)[0]
    tokens = PagedModel(copy, tensor_library).greedy({"a": answer["prompt"].tolist()}, NUM_GREEDY)
    assert tokens["a"] == answer["greedy"].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_stays_near_float32(checkpoints: Path, variant: str, tensor_library: str) -> None:
    if "bfloat16" not in load(tensor_library).cpu_matmul_dtypes:
        pytest.skip(f"{tensor_library} cannot multiply bfloat16 on a CPU")
    answer = reference(checkpoints / variant)[0]
    model = PagedModel(checkpoints / variant, tensor_library, dtype="bfloat16")
    logits = model.step([("a", answer["prompt"].tolist())])[0]
    # Eight bits of mantissa: far from exact, yet a wrong cast or a lost scale would be far outside.
    similarity = np.sum(logits * answer["logits"], -1) / (
        np.linalg.norm(logits, axis=-1) * np.linalg.norm(answer["logits"], axis=-1)
    )
    assert similarity.min() > 0.98
