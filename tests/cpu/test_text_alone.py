"""Checkpoints of families that take pictures, too, as they are released: the text of their decoder,
under names and in a config.json that hold more."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import build, reference
from tests.paged import PagedModel
from tests.parity import check_prompts_and_greedy

# Of each text checkpoint: the architecture, what the decoder's names begin with, other names.
RELEASED = {
    "gemma3": ("Gemma3", "language_model.", ("vision_tower.head.bias", "multi_modal_projector.w")),
    "gemma4": ("Gemma4", "model.language_model.", ("model.vision_tower.w", "model.embed_audio.w")),
    "mistral": ("Mistral3", "language_model.", ("vision_tower.ln_pre.weight",)),
    "llama4": ("Llama4", "language_model.", ("vision_model.class_embedding",)),
    "qwen3-5": ("Qwen3_5", "model.language_model.", ("model.visual.merger.norm.weight", "mtp.x")),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("released"), list(RELEASED))


@pytest.mark.parametrize("variant", RELEASED)
def test_the_text_of_a_release_is_that_of_its_decoder(
    checkpoints: Path, variant: str, tmp_path: Path, tensor_library: str
) -> None:
    from safetensors.numpy import load_file, save_file

    family, prefix, others = RELEASED[variant]
    source = checkpoints / variant
    weights = load_file(source / "model.safetensors")
    named = {
        name.replace("model.", prefix, 1) if prefix.startswith("model.") else prefix + name: weight
        for name, weight in weights.items()
    }
    released = tmp_path / "released"
    released.mkdir()
    save_file(
        {**named, **{name: np.ones(3, np.float32) for name in others}},
        released / "model.safetensors",
    )
    text = json.loads((source / "config.json").read_text("utf-8"))
    config = {
        "architectures": [f"{family}ForConditionalGeneration"],
        "image_token_index": 120,
        "text_config": text,
        "vision_config": {"hidden_size": 8, "num_hidden_layers": 1},
    }
    (released / "config.json").write_text(json.dumps(config), "utf-8")
    check_prompts_and_greedy(PagedModel(released, tensor_library), reference(source))
