"""Quantized models on a GPU: norms and activations round for the product after them, and nothing
comes out other than where a kernel of its own rounds."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.kernels import ChosenKernels
from fastdeploy_core.plugins.resolve import resolve
from tests.paged import PagedModel

pytestmark = pytest.mark.device("cuda")

NUM_LAYERS, VOCAB, NUM_TOKENS = 3, 512, 12
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": NUM_LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
}
PROMPT_LENGTHS = (1, 7, 130, 150)


def made(folder: Path, method: str) -> PagedModel:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    asked = {"load_format": "dummy", "quantization": method, "dtype": "bfloat16"}
    values = {"model": str(folder), "device": "cuda", "tensor_library": "torch", **asked}
    config = build_engine_config(values)
    resolved = resolve(config, layers=read_shapes(config.model.hf_config, 1).layers)
    return PagedModel(folder, "torch", device="cuda", drivers=resolved.load, **asked)


def said(model: PagedModel) -> tuple[dict[str, list[int]], list[np.ndarray]]:
    """Greedy tokens, and logits of all prompts in one step."""
    rng = np.random.default_rng(3)
    prompts = {str(n): rng.integers(3, VOCAB, n).tolist() for n in PROMPT_LENGTHS}
    greedy = model.greedy(prompts, NUM_TOKENS)
    logits = model.step([(f"again {name}", ids) for name, ids in prompts.items()])
    model.close()
    return greedy, logits


@pytest.mark.parametrize("method", ["wfp8afp8", "block_wise_fp8", "w8a8", "w4a8"])
def test_models_say_the_same_as_with_a_kernel_that_rounds(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fd_cuda.kernels import quant_fused

    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        run = getattr(quant_fused, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return run(*arguments)

        return call

    for name in ("add_rms_norm", "silu_and_mul"):
        monkeypatch.setattr(quant_fused, name, counted(name))
    tokens, logits = said(made(tmp_path, method))
    steps = NUM_TOKENS + 1
    # The first norm of all has no sum before it, the last one no packed product after it.
    assert calls == {
        "add_rms_norm": (2 * NUM_LAYERS - 1) * steps,
        "silu_and_mul": NUM_LAYERS * steps,
    }
    monkeypatch.setattr(ChosenKernels, "behind", lambda self, operation, before: None)
    expected_tokens, expected = said(made(tmp_path, method))
    assert sum(calls.values()) == (3 * NUM_LAYERS - 1) * steps
    assert tokens == expected_tokens
    for ours, theirs in zip(logits, expected, strict=True):
        assert np.isfinite(ours).all() and np.ptp(ours) > 0
        np.testing.assert_array_equal(ours, theirs)
