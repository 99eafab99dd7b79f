"""Makes a model folder to measure with: a published model's shape, the demo model's tokenizer with
a word for every further id, random weights.

    python benchmarks/random_model.py ernie-0.3b /tmp/m                 # for --load-format dummy
    python benchmarks/random_model.py ernie-21b-a3b /tmp/m --weights    # with safetensors files

Weights are bfloat16 noise with the deviation of initial values, written by several threads; a block
of noise is repeated, so that writing is as fast as the disk.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
_ERNIE = {
    "vocab_size": 103424,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "use_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
_QWEN = {**_ERNIE, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
SHAPES: dict[str, dict[str, Any]] = {
    "ernie-0.3b": {
        **_ERNIE,
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "ernie-21b-a3b": {
        **_ERNIE,
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 27,
        "moe_layer_interval": 1,
    },
    "ernie-300b-a47b": {
        **_ERNIE,
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 54,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 3584,
        "moe_k": 8,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 3,
        "moe_layer_end_index": 53,
        "moe_layer_interval": 1,
    },
    "qwen3-0.6b": {
        **_QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "qwen3-8b": {
        **_QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "qwen3-next-80b-a3b": {
        **_QWEN,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "tie_word_embeddings": False,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 200002,
        "torch_dtype": "bfloat16",
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "eos_token_id": 151329,
        "torch_dtype": "bfloat16",
    },
}
FILE_BYTES = 5 << 30
NOISE = 1 << 24  # numbers before the block repeats


def make_folder(shape: str, folder: Path) -> dict[str, Any]:
    """Configuration and tokenizer; returns the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (ROOT / "models" / "ernie-tiny").glob("*token*"):
        shutil.copy(file, folder)
    config, file = SHAPES[shape], folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"Ġw{number}": number for number in range(len(words), config["vocab_size"])}
    file.write_text(json.dumps(tokenizer))  # whatever is generated is text, as in real answers
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return config


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint, as the model's publishers store it."""
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_proj.weight", (heads * width, hidden)
        yield f"{at}.self_attn.k_proj.weight", (kv_heads * width, hidden)
        yield f"{at}.self_attn.v_proj.weight", (kv_heads * width, hidden)
        if config["model_type"].startswith("qwen3"):
            yield f"{at}.self_attn.q_norm.weight", (width,)
            yield f"{at}.self_attn.k_norm.weight", (width,)
        yield f"{at}.self_attn.o_proj.weight", (hidden, heads * width)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield from _feed_forward(config, f"{at}.mlp", layer)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _feed_forward(
    config: dict[str, Any], at: str, layer: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    experts = config.get("moe_num_experts") or config.get("num_experts") or 0
    if not experts or layer < config.get("moe_layer_start_index", 0):
        yield from _gated(at, hidden, config["intermediate_size"])
        return
    width = config["moe_intermediate_size"]
    yield f"{at}.gate.weight", (experts, hidden)
    if config["model_type"].startswith("ernie"):
        yield f"{at}.moe_statics.e_score_correction_bias", (1, experts)
        shared = config["moe_num_shared_experts"] * width
        yield from _gated(f"{at}.shared_experts", hidden, shared)
    for expert in range(experts):
        yield from _gated(f"{at}.experts.{expert}", hidden, width)


def _gated(at: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (width, hidden)
    yield f"{at}.up_proj.weight", (width, hidden)
    yield f"{at}.down_proj.weight", (hidden, width)


def write_weights(config: dict[str, Any], folder: Path, seed: int = 0) -> int:
    """Files of up to FILE_BYTES with their index; returns the bytes of all tensors."""
    noise = np.random.default_rng(seed).standard_normal(NOISE, dtype=np.float32) * np.float32(0.02)
    block = (noise.view(np.uint32) >> 16).astype(np.uint16)
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = total = 0
    for name, shape in tensors(config):
        num_bytes = 2 * math.prod(shape)
        if parts[-1] and size + num_bytes > FILE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append((name, shape))
        size, total = size + num_bytes, total + num_bytes
    names = [f"model-{n + 1:05}-of-{len(parts):05}.safetensors" for n in range(len(parts))]
    with ThreadPoolExecutor(8) as pool:
        jobs = zip([folder / name for name in names], parts, strict=True)
        list(pool.map(lambda job: _write(*job, block), jobs))
    weight_map = {t: name for name, part in zip(names, parts, strict=True) for t, _ in part}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write(path: Path, part: list[tuple[str, tuple[int, ...]]], block: np.ndarray) -> None:
    header, position = {}, 0
    for name, shape in part:
        stop = position + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, stop]}
        position = stop
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 64)
    ones = np.full(1 << 16, 0x3F80, np.uint16)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for name, shape in part:
            left = math.prod(shape)
            source = ones if "norm" in name else block
            while left:
                count = min(left, source.size)
                file.write(source[:count])
                left -= count


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", action="store_true", help="write safetensors files, too")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    options = parser.parse_args()
    config = make_folder(options.shape, options.folder)
    if options.weights:
        began = time.perf_counter()
        total = write_weights(config, options.folder, options.seed)
        seconds = time.perf_counter() - began
        print(f"{total / 1e9:.1f} GB in {seconds:.1f} s ({total / 1e9 / seconds:.1f} GB/s)")


if __name__ == "__main__":
    main()
