"""The conformance kit, with the demo model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastdeploy_testing.conformance.test_drafter import DrafterConformance
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance

DEMO = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny"


class _Drafts(DrafterConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> Path:
        return DEMO


@pytest.mark.slow
class TestEagle3(_Drafts):
    driver_name = "eagle3"

    @pytest.fixture(scope="class")
    @classmethod
    def options(cls) -> dict[str, Any]:
        return {"model": str(DEMO.with_name("ernie-tiny-eagle3"))}


@pytest.mark.slow
class TestDFlash(_Drafts):
    """With random weights: what is drafted is seldom right, and must change nothing."""

    driver_name = "dflash"

    @pytest.fixture(scope="class")
    @classmethod
    def options(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("dflash")
        target = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
        names = ("vocab_size", "hidden_size", "head_dim", "rms_norm_eps", "torch_dtype")
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = {
            **{name: target[name] for name in names},
            **heads,
            "architectures": ["DFlashDraftModel"],
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "block_size": 8,
            "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 6]},
        }
        (folder / "config.json").write_text(json.dumps(config))
        hidden, dim = target["hidden_size"], target["head_dim"]
        shapes = {"fc": (hidden, 2 * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
        for number in range(2):
            shapes |= {
                f"layers.{number}.{name}": shape
                for name, shape in (
                    ("self_attn.q_proj", (4 * dim, hidden)),
                    ("self_attn.k_proj", (2 * dim, hidden)),
                    ("self_attn.v_proj", (2 * dim, hidden)),
                    ("self_attn.o_proj", (hidden, 4 * dim)),
                    ("self_attn.q_norm", (dim,)),
                    ("self_attn.k_norm", (dim,)),
                    ("mlp.gate_proj", (96, hidden)),
                    ("mlp.up_proj", (96, hidden)),
                    ("mlp.down_proj", (hidden, 96)),
                    ("input_layernorm", (hidden,)),
                    ("post_attention_layernorm", (hidden,)),
                )
            }
        noise = np.random.default_rng(1).standard_normal
        tensors = {f"{n}.weight": noise(shape).astype("f4") / 16 for n, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors")
        return {"model": str(folder)}


class TestEagle3Hygiene(HygieneConformance):
    kind = "speculative"
    driver_name = "eagle3"


class TestDFlashHygiene(HygieneConformance):
    kind = "speculative"
    driver_name = "dflash"
