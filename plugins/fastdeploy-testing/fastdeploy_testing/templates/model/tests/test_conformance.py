"""The core's conformance kit, for this family: a small checkpoint with random weights, and what
transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdeploy_testing.conformance.test_model import ModelConformance


class TestMyModel(ModelConformance):
    driver_name = "MyModelForCausalLM"

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Saved by transformers, which reads `model_type`; the core reads `architectures`."""
        torch = pytest.importorskip("torch", reason="the checkpoint is written with torch")
        transformers = pytest.importorskip("transformers", reason="it writes the checkpoint")
        torch.manual_seed(5)
        config = transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            attention_bias=True,
            initializer_range=0.3,
        )
        model = transformers.LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zeros could be left out and nobody would see it
                torch.nn.init.normal_(parameter, std=0.3)
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text("utf-8"))
        written["architectures"] = ["MyModelForCausalLM"]
        (folder / "config.json").write_text(json.dumps(written), "utf-8")
        return folder
