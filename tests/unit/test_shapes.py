"""models/shapes.py: shapes of one rank from config.json alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.errors import ConfigError, PluginNotFound, UnsupportedModel
from fastdeploy_core.models.shapes import ARCHITECTURES, read_shapes

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ERNIE_MOE: dict[str, Any] = {
    **QWEN2,
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "moe_num_experts": 16,
    "moe_k": 4,
    "moe_intermediate_size": 32,
}


def test_ranks_divide_heads_and_cache() -> None:
    one, two = read_shapes(QWEN2, 1), read_shapes(QWEN2, 2)
    assert (one.layers[0].num_heads, one.layers[0].num_kv_heads) == (8, 2)
    assert (two.layers[0].num_heads, two.layers[0].num_kv_heads) == (4, 1)
    assert one.layers[0].head_dim == two.layers[0].head_dim == one.layers[0].v_head_dim == 8


def test_more_ranks_than_kv_heads_replicate_them() -> None:
    shapes = read_shapes(QWEN2, 4)
    assert (shapes.layers[0].num_heads, shapes.layers[0].num_kv_heads) == (2, 1)


def test_a_size_that_ranks_cannot_divide_is_refused_with_the_possible_sizes() -> None:
    with pytest.raises(ConfigError, match=r"intermediate_size 96 .* 5; possible: 1, 2, 3, 4, 6"):
        read_shapes(QWEN2, 5)


def test_ernie_routing_has_a_correction_bias_and_softmax_scores() -> None:
    shapes = read_shapes(ERNIE_MOE, 2, "bfloat16")
    assert shapes.moe is not None
    routing = shapes.moe.routing
    assert (routing.num_experts, routing.top_k, routing.scoring) == (16, 4, "softmax")
    assert routing.has_correction_bias
    assert routing.renormalize
    assert shapes.moe.intermediate_size == 16
    assert shapes.layers[0].rotary_interleaved
    assert shapes.layers[0].dtype == "bfloat16"


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_missing_size_is_named(architecture: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    config = {**ERNIE_MOE, **experts, "architectures": [architecture]}
    assert read_shapes(config).num_layers == 5
    del config["num_hidden_layers"]
    with pytest.raises(ConfigError, match="num_hidden_layers=None"):
        read_shapes(config)


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "8", [8]])
def test_a_size_of_the_wrong_kind_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads"):
        read_shapes({**QWEN2, "num_attention_heads": value})


def test_an_unknown_architecture_is_told_what_there_is() -> None:
    with pytest.raises(UnsupportedModel, match=r"'GrokForCausalLM'.*possible:.*LlamaForCausalLM"):
        read_shapes({**QWEN2, "architectures": ["GrokForCausalLM"]})


def test_a_family_of_a_distribution_that_is_missing_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(kind: str, name: str) -> Any:
        raise PluginNotFound(f"{kind} {name}")

    monkeypatch.setattr("fastdeploy_core.plugins.lookup", nothing)
    with pytest.raises(UnsupportedModel, match=r"MixtralForCausalLM.*pip install fd-models$"):
        read_shapes({**QWEN2, "architectures": ["MixtralForCausalLM"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["linear"] * 64},
            "layer_types 'linear'.*possible: full_attention, sliding_attention",
        ),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
            r"ntk.*possible: default, dynamic, factors, linear",
        ),
    ],
)
def test_what_would_give_wrong_answers_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_shapes({**QWEN2, **change})


def test_a_least_sum_of_weights_that_counts_is_refused() -> None:
    assert read_shapes({**ERNIE_MOE, "moe_norm_min": 1e-12}).moe
    with pytest.raises(UnsupportedModel, match=r"moe_norm_min 0\.5.*possible: up to 1e-6"):
        read_shapes({**ERNIE_MOE, "moe_norm_min": 0.5})


def test_which_blocks_of_qwen_have_a_window() -> None:
    used = {"use_sliding_window": True, "sliding_window": 8}
    later = read_shapes({**QWEN2, **used, "max_window_layers": 3}).layers
    assert [layer.window for layer in later] == [0, 0, 0, 8, 8]
    moe = {**ERNIE_MOE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 2}
    every = read_shapes({**moe, **used, "num_experts": 4, "max_window_layers": 3}).layers
    assert [layer.window for layer in every] == [8] * 5


def test_entry_points_agree_with_the_table() -> None:
    import tomllib

    root = Path(__file__).resolve().parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["fastdeploy.models"] == ARCHITECTURES


def test_reading_shapes_imports_no_tensor_library() -> None:
    code = (
        "import sys; from fastdeploy_core.models.shapes import ARCHITECTURES, model_class;"
        "[model_class({'architectures': [a]}) for a in ARCHITECTURES];"
        "sys.exit(bool({'torch', 'paddle'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
