"""DeepSeek V3's shapes, from config.json alone; no tensor library."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_core.errors import ConfigError
from fastdeploy_core.models.shapes import read_shapes

DEEPSEEK: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
}


def test_latent_attention_caches_one_row_whatever_the_ranks() -> None:
    for ranks in (1, 2, 4):
        shapes = read_shapes(DEEPSEEK, ranks)
        assert shapes.layers[0].kind == "mla"
        assert shapes.layers[0].num_heads == 8 // ranks
        assert (shapes.layers[0].head_dim, shapes.layers[0].v_head_dim) == (24, 20)
        assert shapes.layers[0].num_kv_heads == 1
        assert shapes.layers[0].scale == pytest.approx(16**-0.5)


def test_yarn_raises_the_attention_scale_only_with_mscale_all_dim() -> None:
    yarn = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 64}
    plain = read_shapes({**DEEPSEEK, "rope_scaling": yarn})
    raised = read_shapes({**DEEPSEEK, "rope_scaling": {**yarn, "mscale_all_dim": 1.0}})
    assert plain.layers[0].scale == pytest.approx(0.25)
    assert raised.layers[0].scale == pytest.approx(0.25 * 1.8735, rel=1e-3)  # (0.1 ln 40 + 1)^2


@pytest.mark.parametrize("size", ["num_hidden_layers", "kv_lora_rank", "moe_intermediate_size"])
def test_a_missing_size_is_named(size: str) -> None:
    config = {name: value for name, value in DEEPSEEK.items() if name != size}
    with pytest.raises(ConfigError, match=f"{size}=None"):
        read_shapes(config)
