"""The demo model that ships in the repository, in float32, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import NUM_GREEDY, ask
from tests.paged import PagedModel

DEMO = Path(__file__).resolve().parents[2] / "models" / "ernie-tiny"


def test_the_demo_model_equals_transformers(tensor_library: str, tmp_path: Path) -> None:
    if not list(DEMO.glob("*.safetensors")):
        pytest.skip("this tree holds no demo weights (models/ernie-tiny/*.safetensors)")
    answers = ask(DEMO, tmp_path)
    model = PagedModel(DEMO, tensor_library, dtype="float32")
    prompts = {str(i): answer["prompt"].tolist() for i, answer in enumerate(answers)}
    logits = model.step([(f"logits{n}", p) for n, p in prompts.items()])
    for ours, answer in zip(logits, answers, strict=True):
        theirs = answer["logits"]
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
    tokens = model.greedy(prompts, NUM_GREEDY)
    assert [tokens[n] for n in prompts] == [a["greedy"].tolist() for a in answers]
    assert model.loaded.model.mtp_weights  # kept for the drafter
