"""The memory table's arithmetic: by hand for ERNIE-4.5-300B-A47B, and against models that are
loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fd_calibrate.sizes import weight_bytes

# config.json of ERNIE-4.5-300B-A47B, what matters of it.
ERNIE_300B: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "vocab_size": 103424,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 54,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "moe_num_experts": 64,
    "moe_k": 8,
    "moe_intermediate_size": 3584,
    "moe_num_shared_experts": 0,
    "moe_layer_start_index": 3,
    "moe_layer_end_index": 53,
    "moe_layer_interval": 1,
    "tie_word_embeddings": False,
    "use_bias": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
HIDDEN, INNER, LAYERS, EXPERTS = 8192, 3584, 51, 64
EXPERT_WEIGHTS = LAYERS * EXPERTS * 3 * HIDDEN * INNER
EXPERT_ROWS = LAYERS * EXPERTS * (2 * INNER + HIDDEN)
ATTENTION = 54 * (HIDDEN * (HIDDEN + 2 * 1024) + HIDDEN * HIDDEN)
DENSE = ATTENTION + 3 * 3 * HIDDEN * 28672
DENSE_ROWS = 54 * (HIDDEN + 2 * 1024 + HIDDEN) + 3 * (2 * 28672 + HIDDEN)
ROUTERS = LAYERS * EXPERTS * HIDDEN * 2
OTHER = 2 * 2 * 103424 * HIDDEN + 2 * (2 * 54 + 1) * HIDDEN + 2 * LAYERS * EXPERTS


@pytest.mark.parametrize(
    ("method", "experts", "linear"),
    [
        ("", 2 * EXPERT_WEIGHTS, 2 * DENSE),
        ("wint8", EXPERT_WEIGHTS + 4 * EXPERT_ROWS, DENSE + 4 * DENSE_ROWS),
        ("wint4", EXPERT_WEIGHTS / 2 + 4 * EXPERT_ROWS, DENSE + 4 * DENSE_ROWS),
        (
            '{"quantization": "wint4", "group_size": 128}',
            EXPERT_WEIGHTS / 2 + 4 * EXPERT_WEIGHTS / 128,
            DENSE / 2 + 4 * DENSE / 128,
        ),
        (
            "block_wise_fp8",
            EXPERT_WEIGHTS + 4 * EXPERT_WEIGHTS / 128**2,
            DENSE + 4 * DENSE / 128**2,
        ),
    ],
)
def test_bytes_of_ernie_300b_by_hand(method: str, experts: float, linear: float) -> None:
    assert weight_bytes(ERNIE_300B, method) == {
        "experts": int(experts),
        "linear": int(linear) + ROUTERS,
        "other": OTHER,
    }


def test_ranks_share_the_bytes() -> None:
    one, eight = (weight_bytes(ERNIE_300B, "wint8", tp_size=n) for n in (1, 8))
    # Scales of layers whose inputs are divided are on every rank.
    assert one["experts"] < 8 * eight["experts"] < 1.005 * one["experts"]


@pytest.mark.parametrize("method", ["", "wint8", "wint4", "w4a8", "wfp8afp8"])
def test_arithmetic_is_what_loading_takes(method: str, tiny_model: Path, load: Any) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    asked = '{"quantization": "wint4", "group_size": 0}' if method == "wint4" else method
    loaded, _ = load(tiny_model, quantization=asked, load_format="dummy")
    assert sum(weight_bytes(config, asked, "float32").values()) == loaded.weight_bytes
