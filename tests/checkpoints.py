"""Tiny random checkpoints that transformers itself saves, with its own answers beside them.

Run as a program in a child process (`build(folder)` does that), because transformers needs torch
and the suite may be running on Paddle. Every family's features are switched on: grouped heads,
biases, tied and untied heads, rope scalings, shared experts, groups, a correction bias that is not
zero.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 131  # odd on purpose: it has to be padded when ranks divide it
PROMPT_LENGTHS = (5, 23)
NUM_GREEDY = 64
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_DEEPSEEK = {
    "architecture": "DeepseekV3",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "num_mtp_layers": 0,
}
# name: the model family's class prefix and what differs from _COMMON.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {
        "architecture": "Llama",
        "rope_parameters": _LLAMA3,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
    },
    "llama-linear": {
        "architecture": "Llama",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "qwen2": {"architecture": "Qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "architecture": "Qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen2-yarn": {"architecture": "Qwen2", "rope_parameters": _YARN},
    "qwen3": {
        "architecture": "Qwen3",
        "head_dim": 16,
        "num_key_value_heads": 1,  # fewer than ranks: replicated
        "tie_word_embeddings": True,
    },
    "qwen3-moe": {
        "architecture": "Qwen3Moe",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "ernie": {"architecture": "Ernie4_5", "tie_word_embeddings": True, "use_bias": True},
    "ernie-moe": {
        "architecture": "Ernie4_5_Moe",
        "use_bias": True,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 24,
        "moe_k": 3,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "ernie-moe-no-bias": {
        "architecture": "Ernie4_5_Moe",
        "tie_word_embeddings": True,
        "moe_intermediate_size": 24,
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 2,
    },
    "deepseek": {
        **_DEEPSEEK,
        "q_lora_rank": 28,
        "rope_parameters": {**_YARN, "mscale": 0.8, "mscale_all_dim": 1.2},
    },
    "deepseek-no-q-lora": {**_DEEPSEEK, "q_lora_rank": None, "attention_bias": True},
}
_EXPERTS = {"num_experts_per_tok": 3, "num_local_experts": 8}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.3, 1.7],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 128,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
# Saved when asked for by name: families of fd-models.
FAMILY_VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek-v32": {
        **_DEEPSEEK,
        "architecture": "DeepseekV32",
        "q_lora_rank": 28,
        "index_n_heads": 16,  # with few, many scores are 0, and the order of equal ones is torch's
        "index_head_dim": 16,
        "index_topk": 12,
        "rope_parameters": {**_YARN, "mscale": 0.8, "mscale_all_dim": 1.2},
    },
    "mistral": {"architecture": "Mistral", "head_dim": 16, "sliding_window": None},
    "mistral-window": {"architecture": "Mistral", "head_dim": 16, "sliding_window": 12},
    "qwen2-moe-window": {
        "architecture": "Qwen2Moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
    "gemma2": {
        "architecture": "Gemma2",
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": {
        "architecture": "Gemma3",
        "config": "Gemma3TextConfig",
        "head_dim": 16,
        "sliding_window": 7,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gemma4": {
        "architecture": "Gemma4",
        "config": "Gemma4TextConfig",
        "head_dim": 16,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 7,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 5.0,
    },
    "gpt-oss": {
        "architecture": "GptOss",
        "hidden_size": 64,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.5,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral-yarn": {
        "architecture": "Mistral",
        "head_dim": 16,
        "sliding_window": 256,
        "max_position_embeddings": 512,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "mixtral": {"architecture": "Mixtral", **_EXPERTS, "sliding_window": None},
    "qwen2-moe": {
        "architecture": "Qwen2Moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "qwen2-moe-norm": {
        "architecture": "Qwen2Moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
    },
    "olmo2": {"architecture": "Olmo2", "num_key_value_heads": 1},
    "olmo2-bias": {
        "architecture": "Olmo2",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "rope_parameters": _LLAMA3,
    },
    "olmo3": {
        "architecture": "Olmo3",
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "rope_parameters": {
            "full_attention": {**_YARN, "attention_factor": 1.2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "phi3": {"architecture": "Phi3"},
    "phi3-partial": {
        "architecture": "Phi3",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "phi3-longrope": {
        "architecture": "Phi3",
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 128,
        "rope_parameters": _LONGROPE,
    },
    "glm4-moe": {
        "architecture": "Glm4Moe",
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "num_mtp_layers": 0,
    },
    "glm4-moe-groups": {
        "architecture": "Glm4Moe",
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
        "first_k_dense_replace": 2,
        "num_mtp_layers": 0,
    },
    "minimax-m2": {
        "architecture": "MiniMaxM2",
        **_EXPERTS,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "cohere2": {
        "architecture": "Cohere2",
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "logit_scale": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "cohere2-moe": {
        "architecture": "Cohere2Moe",
        "head_dim": 16,
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 40,
        "rope_theta": 50000.0,
    },
    "exaone-moe": {
        "architecture": "ExaoneMoe",
        "head_dim": 16,
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    "exaone4": {
        "architecture": "Exaone4",
        "head_dim": 16,
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "rope_parameters": _LLAMA3,
    },
    "glm": {"architecture": "Glm", "head_dim": 16, "num_key_value_heads": 1},
    "glm4": {"architecture": "Glm4", "head_dim": 16},
    "granite3": {**_MULTIPLIERS, "architecture": "Granite", "mlp_bias": True},
    "granite3-moe": {**_MULTIPLIERS, "architecture": "GraniteMoe", **_EXPERTS},
    "hunyuan-moe": {
        "architecture": "HunYuanMoEV1",
        "head_dim": 16,
        "num_experts": 8,
        "moe_topk": 3,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 1000.0,
            "factor": 1.0,
        },
    },
    "hy3": {
        "architecture": "HYV3",
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    "olmoe": {"architecture": "Olmoe", "num_experts": 8, "num_experts_per_tok": 3},
    "seed-oss": {
        "architecture": "SeedOss",
        "head_dim": 16,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "llama4": {
        "architecture": "Llama4",
        "config": "Llama4TextConfig",
        "head_dim": 16,
        "num_hidden_layers": 5,
        "intermediate_size_mlp": 40,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4-plain": {
        "architecture": "Llama4",
        "config": "Llama4TextConfig",
        "head_dim": 16,
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 12,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_bias": True,
        "no_rope_layers": [1, 0, 1],
        "moe_layers": [0, 1],
        "rope_parameters": _LLAMA3,
    },
}
# Saved when asked for by name: what a GGUF file can hold, in sizes that its blocks divide.
# The longest context that these promise to compute as transformers does.
FAMILY_LIMITS: dict[str, dict[str, Any]] = {
    "mistral-yarn": {"max_model_len": 256},
    "phi3-longrope": {"max_model_len": 128},
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rms_norm_eps": 1e-6,
}
_SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_GRANITE: dict[str, Any] = {
    "architecture": "GraniteMoeHybrid",
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "num_hidden_layers": 4,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    **_MULTIPLIERS,
}
_NEMOTRON: dict[str, Any] = {
    "architecture": "NemotronH",
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 1e-30,  # below it transformers cuts steps of prompts, and none of decodes
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
# Families whose layers keep states.
STATE_VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "architecture": "Qwen3Next",
        **_DELTA,
        **_SHARED_EXPERT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "qwen3-5": {
        "architecture": "Qwen3_5",
        "config": "Qwen3_5TextConfig",
        **_DELTA,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "qwen3-5-moe": {
        "architecture": "Qwen3_5Moe",
        "config": "Qwen3_5MoeTextConfig",
        **_DELTA,
        **_SHARED_EXPERT,
        "linear_num_value_heads": 2,
    },
    "granite4": {
        **_GRANITE,
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_n_groups": 2,
        "position_embedding_type": "nope",
    },
    "granite4-dense": {
        **_GRANITE,
        "num_local_experts": 0,
        "mamba_n_groups": 1,
        "mamba_proj_bias": True,
        "position_embedding_type": "rope",
    },
    "nemotron-h": {
        **_NEMOTRON,
        "layers_block_type": [
            *("linear_attention", "moe", "linear_attention", "full_attention", "mlp"),
            *("linear_attention", "moe"),
        ],
        "moe_latent_size": 32,
        "n_group": 4,
        "topk_group": 2,
    },
    "kimi-linear": {
        "architecture": "KimiLinear",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layer_types": [
            *("linear_attention", "linear_attention", "full_attention", "linear_attention")
        ],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "moe_intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
    },
    "lfm2": {
        "architecture": "Lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "conv_bias": True,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 16,
    },
}
STATE_VARIANTS["lfm2-moe"] = {
    **STATE_VARIANTS["lfm2"],
    "architecture": "Lfm2Moe",
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
GGUF_VARIANTS: dict[str, dict[str, Any]] = {
    "gguf-qwen3-moe": {**VARIANTS["qwen3-moe"], "mlp_only_layers": []},
    "gguf-deepseek": {
        **VARIANTS["deepseek"],
        "rope_parameters": {**_YARN, "mscale": 1.2, "mscale_all_dim": 1.2},
    },
    "gguf-wide": {
        "architecture": "Qwen3",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "head_dim": 64,
    },
    "gguf-tied": {
        "architecture": "Qwen3",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "gguf-experts": {
        **VARIANTS["qwen3-moe"],
        "mlp_only_layers": [],
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
    },
}
# The same families as wide as kernels for real models want them: heads of 128, products of whole
# tiles.
_WIDE = {
    "vocab_size": 1031,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
_WIDE_EXPERTS = {"moe_intermediate_size": 128}
WIDE_VARIANTS: dict[str, dict[str, Any]] = {
    "wide-llama": {**VARIANTS["llama"], **_WIDE},
    "wide-qwen2": {**VARIANTS["qwen2"], **_WIDE},
    "wide-qwen3": {**VARIANTS["qwen3"], **_WIDE},
    "wide-qwen3-moe": {**VARIANTS["qwen3-moe"], **_WIDE, **_WIDE_EXPERTS, "num_experts": 32},
    "wide-ernie": {**VARIANTS["ernie"], **_WIDE, "use_bias": False},
    "wide-ernie-moe": {
        **VARIANTS["ernie-moe"],
        **_WIDE,
        **_WIDE_EXPERTS,
        "use_bias": False,
        "moe_num_experts": 32,
    },
    "wide-deepseek": {
        **VARIANTS["deepseek"],
        **{key: value for key, value in _WIDE.items() if key != "head_dim"},
        **_WIDE_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 32,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
SHARDED = ("qwen3-moe",)  # saved once more in several files, in the subfolder "sharded"


def build(folder: Path, names: list[str] | None = None) -> Path:
    """Copies of the variants below `folder`; returns it. A child process makes each once for all
    runs: what it is depends on this file and on who saves it alone."""
    wanted = list(dict.fromkeys(names or VARIANTS))
    versions = [version(name) for name in ("torch", "transformers", "safetensors", "numpy")]
    made_of = Path(__file__).read_bytes() + " ".join(versions).encode()
    cache = Path(__file__).parents[1] / ".pytest_cache" / "checkpoints"
    store = cache / hashlib.sha256(made_of).hexdigest()[:16]
    store.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for other in cache.glob("*/"):
            if other != store:  # of an earlier state of this file
                shutil.rmtree(other, ignore_errors=True)
        # What a variant ends with: one that failed half-way is made again.
        is_there = {file.parent.name for file in store.glob("*/reference.npz")}
        if not is_there.issuperset(wanted):
            # Importing transformers takes as long as making ten, and most tests want these.
            useful = dict.fromkeys((*wanted, *VARIANTS))
            _run(store, *(name for name in useful if name not in is_there))
    for name in wanted:
        shutil.copytree(store / name, folder / name)
    return folder


def ask(checkpoint: Path, folder: Path) -> list[dict[str, np.ndarray]]:
    """What transformers says about an existing checkpoint, in float32; see `reference`."""
    _run(folder, "--answer", str(checkpoint))
    return reference(folder)


def _run(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, __file__, str(folder), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"transformers failed:\n{done.stderr[-4000:]}")


def reference(folder: Path) -> list[dict[str, np.ndarray]]:
    """What transformers says: for each prompt its ids, logits of all positions, greedy tokens."""
    with np.load(folder / "reference.npz") as data:
        count = len(PROMPT_LENGTHS)
        keys = ("prompt", "logits", "greedy")
        return [{key: data[f"{key}{i}"] for key in keys} for i in range(count)]


def paddle_copy(source: Path, target: Path, *, ernie_names: bool = False) -> Path:
    """The same checkpoint as Paddle tools store it: linear weights [in, out], `dtype` in
    config.json.

    `ernie_names` also joins q, k and v and gate and up, and uses the prefix of ERNIE's own
    releases.
    """
    from safetensors.numpy import load_file, save_file

    target.mkdir(parents=True)
    weights = load_file(source / "model.safetensors")
    if ernie_names:
        weights = {k.replace("model.", "ernie.", 1): v for k, v in _joined(weights).items()}
    stored = {
        name: np.ascontiguousarray(w.T) if w.ndim == 2 and _is_linear(name) else w
        for name, w in weights.items()
    }
    save_file(stored, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    del config["transformers_version"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def obey_config(model: Any) -> Any:
    """The transformers model, with the numbers of gpt-oss's experts that its configuration names:
    before transformers 5.19 these were constants."""
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.alpha = getattr(model.config, "swiglu_alpha", 1.702)
            module.limit = model.config.swiglu_limit
    return model


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """A file with any safetensors dtype, bfloat16 as uint16 bits included."""
    header, position = {}, 0
    for name, (dtype, array) in tensors.items():
        stop = position + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [position, stop]}
        position = stop
    data = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def to_bfloat16(array: np.ndarray) -> tuple[str, np.ndarray]:
    """float32 cut to bfloat16 bits, as write_safetensors takes them."""
    return "BF16", (array.view(np.uint32) >> 16).astype(np.uint16)


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and "embed_tokens" not in name


def _joined(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    joined = dict(weights)
    for first, others, new in (
        ("q_proj", ("k_proj", "v_proj"), "qkv_proj"),
        ("gate_proj", ("up_proj",), "up_gate_proj"),
    ):
        for name in [n for n in joined if first in n]:
            parts = [joined.pop(name), *(joined.pop(name.replace(first, o)) for o in others)]
            joined[name.replace(first, new)] = np.concatenate(parts)
    return joined


def _save(name: str, folder: Path) -> None:
    import torch
    import transformers

    families = FAMILY_VARIANTS | STATE_VARIANTS
    settings = {**_COMMON, **(VARIANTS | families | GGUF_VARIANTS | WIDE_VARIANTS)[name]}
    family = settings.pop("architecture")
    config = getattr(transformers, settings.pop("config", f"{family}Config"))(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    _randomize(model)
    model.save_pretrained(folder)
    if name in SHARDED:
        model.save_pretrained(folder / "sharded", max_shard_size="60KB")
    _answer(model, folder / "reference.npz")


def _answer(model: Any, target: Path) -> None:
    """Random prompts, the logits of all their positions, and what greedy decoding adds."""
    import torch

    obey_config(model)
    generator = np.random.default_rng(7)
    answers = {}
    for number, length in enumerate(PROMPT_LENGTHS):
        prompt = generator.integers(3, VOCAB, length)
        answers[f"prompt{number}"] = prompt
        with torch.no_grad():
            output = model(torch.tensor(prompt)[None], use_cache=True)
            answers[f"logits{number}"] = output.logits[0].numpy()
            tokens = [int(output.logits[0, -1].argmax())]
            while len(tokens) < NUM_GREEDY:
                step = torch.tensor([[tokens[-1]]])
                output = model(step, past_key_values=output.past_key_values, use_cache=True)
                tokens.append(int(output.logits[0, -1].argmax()))
        answers[f"greedy{number}"] = np.array(tokens)
    np.savez(target, **answers)


def _randomize(model: Any) -> None:
    """Larger than initial values, so that attention and routing are far from uniform."""
    import torch

    spread = 0.15 * (_COMMON["hidden_size"] / model.config.hidden_size) ** 0.5
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("norm.weight", "layernorm.weight", "layer_scalar")):
                tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
            elif "inv_freq" not in name and "embed_scale" not in name:
                tensor.copy_(spread * torch.randn_like(tensor))
        model.tie_weights()


def _answer_existing(source: str, folder: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype="float32", attn_implementation="eager"
    )
    _answer(model.eval(), folder / "reference.npz")


if __name__ == "__main__":
    if sys.argv[2] == "--answer":
        _answer_existing(sys.argv[3], Path(sys.argv[1]))
    else:
        for variant in sys.argv[2:]:
            _save(variant, Path(sys.argv[1]) / variant)
