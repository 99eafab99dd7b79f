"""A two-layer Ernie 4.5 MoE model with random weights and no tokenizer, for end-to-end checks.

Weights are large enough that greedy tokens differ between prompts, and the same on every machine:
they come from numpy's generator with a fixed seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

VOCAB: Final = 128
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 1,
    "moe_layer_interval": 1,
    "moe_use_aux_free": True,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "use_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors; returns the folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", "utf-8")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}\n', "utf-8")
    rng = np.random.default_rng(seed)
    tensors = {
        name: (
            np.ones(shape, np.float32)
            if name.endswith("norm.weight")
            else (rng.standard_normal(shape) * _scale(name, shape)).astype(np.float32)
        )
        for name, shape in shapes().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def shapes() -> dict[str, tuple[int, ...]]:
    """Checkpoint name to shape, in the layout that transformers saves."""
    hidden, width = CONFIG["hidden_size"], CONFIG["head_dim"]
    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCAB, hidden),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.input_layernorm.weight"] = (hidden,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = (count * width, hidden)
        found[f"{prefix}.self_attn.o_proj.weight"] = (hidden, heads * width)
        if layer < CONFIG["moe_layer_start_index"]:
            found |= _mlp(f"{prefix}.mlp", CONFIG["intermediate_size"])
            continue
        experts, inner = CONFIG["moe_num_experts"], CONFIG["moe_intermediate_size"]
        found[f"{prefix}.mlp.gate.weight"] = (experts, hidden)
        found[f"{prefix}.mlp.moe_statics.e_score_correction_bias"] = (1, experts)
        for expert in range(experts):
            found |= _mlp(f"{prefix}.mlp.experts.{expert}", inner)
        found |= _mlp(f"{prefix}.mlp.shared_experts", inner * CONFIG["moe_num_shared_experts"])
    return found


def _mlp(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    hidden = CONFIG["hidden_size"]
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _scale(name: str, shape: tuple[int, ...]) -> float:
    if "correction_bias" in name:
        return 0.05
    if "embed_tokens" in name:
        return 1.0
    return 1.5 / float(shape[-1]) ** 0.5
