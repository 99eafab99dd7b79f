"""Every architecture against transformers, on checkpoints that transformers saved, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastdeploy_core.tensor import load
from tests.checkpoints import NUM_GREEDY, VARIANTS, build, paddle_copy, reference
from tests.paged import PagedModel

TOLERANCE = 1e-4  # of the largest logit


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoints"))


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_logits_and_64_greedy_tokens_equal_transformers(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    answers = reference(checkpoints / variant)
    model = PagedModel(checkpoints / variant, tensor_library)
    prompts = {str(i): answer["prompt"].tolist() for i, answer in enumerate(answers)}
    # Both prompts in one batch of uneven lengths, then decoded together.
    logits = model.step([(f"logits{n}", p) for n, p in prompts.items()])
    errors = [relative_error(x, a["logits"]) for x, a in zip(logits, answers, strict=True)]
    print(f"{variant} on {tensor_library}: largest relative logit error {max(errors):.1e}")
    assert max(errors) < TOLERANCE
    tokens = model.greedy(prompts, NUM_GREEDY)
    assert [tokens[n] for n in prompts] == [a["greedy"].tolist() for a in answers]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_in_chunks_beside_a_decode_gives_the_same_logits(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    short, long = reference(checkpoints / variant)
    model = PagedModel(checkpoints / variant, tensor_library)
    prompt, greedy = long["prompt"].tolist(), short["greedy"].tolist()
    model.step([("decode", short["prompt"].tolist())])
    seen = []
    for start, stop, token in ((0, 1, greedy[0]), (1, 12, greedy[1]), (12, 23, greedy[2])):
        chunk, decoded = model.step([("chunked", prompt[start:stop]), ("decode", [token])])
        seen.append(chunk)
    assert relative_error(np.concatenate(seen), long["logits"]) < TOLERANCE
    assert int(decoded[-1].argmax()) == greedy[3]


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
