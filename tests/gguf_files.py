"""GGUF files of transformers checkpoints, written with the gguf package as llama.cpp's converter
does.

Names come from the package's own table, settings go through its writer; experts are stacked,
Llama's query and key rows are put in llama.cpp's order, latent attention's up-projection is cut in
two.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "DeepseekV3ForCausalLM": "deepseek2",
}
_TYPES = gguf.GGMLQuantizationType
SMALL_HIDDEN, SMALL_VOCAB = 64, 40
# Which type each tensor of 2 or more dimensions gets; vectors are float32.
Choose = Callable[[str, np.ndarray], gguf.GGMLQuantizationType]


def write_gguf(
    checkpoint: Path,
    target: Path,
    kind: str | Choose = "F32",
    *,
    tokenizer: Path | None = None,
    **settings: Any,
) -> Path:
    """The checkpoint as a GGUF file whose matrices have the type `kind`. Further `settings` are
    added to the architecture's."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(target, architecture)
    _write_settings(writer, config)
    for key, value in settings.items():
        name = f"{architecture}.{key}"
        if isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    if tokenizer is None:
        write_byte_tokens(writer, config["vocab_size"])
    else:
        write_tokenizer(writer, tokenizer)
    for name, array in converted(checkpoint, config, architecture).items():
        choice = _type_of(kind, name, array)
        writer.add_tensor(name, quantized(array, choice), raw_dtype=choice)
    return _finished(writer, target)


def _finished(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows of bytes; for formats that the package only reads, random ones of a weight's size."""
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        values, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*array.shape[:-1], array.shape[-1] // values, size)
        seed = zlib.crc32(np.ascontiguousarray(array).tobytes())
        blocks = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        scale = np.array([2e-4], np.float16).view(np.uint8)
        if kind == _TYPES.Q6_K:
            blocks[..., -2:] = scale
        else:  # Q4_K, Q5_K: the scale, then the minimum's
            blocks[..., 0:2], blocks[..., 2:4] = scale, np.array([1e-3], np.float16).view(np.uint8)
        return blocks.reshape(*array.shape[:-1], -1)


def _type_of(kind: str | Choose, name: str, array: np.ndarray) -> gguf.GGMLQuantizationType:
    if array.ndim < 2 or "ffn_gate_inp" in name:
        return _TYPES.F32
    return kind(name, array) if callable(kind) else _TYPES[kind]


def converted(checkpoint: Path, config: dict[str, Any], architecture: str) -> dict[str, np.ndarray]:
    """The checkpoint's tensors under GGUF names, in llama.cpp's order."""
    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(by_name[architecture], config["num_hidden_layers"])
    found: dict[str, np.ndarray] = {}
    for name, array in _merged(_load(checkpoint), config).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if architecture == "llama" and re.search(r"\.(q|k)_proj\.", name):
            heads = config["num_key_value_heads" if ".k_proj." in name else "num_attention_heads"]
            array = _pairs(array, heads)
        if name.endswith("e_score_correction_bias"):
            name, array = name.removesuffix("_bias") + ".bias", array.reshape(-1)
        if name.endswith("kv_b_proj.weight"):
            found.update(_halves(name, array, config, table))
            continue
        new = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise KeyError(f"the gguf package has no name for {name}")
        found[new] = array.astype(np.float32)
    if config.get("rope_parameters", {}).get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3_factors(config)
    return found


def _load(checkpoint: Path) -> dict[str, np.ndarray]:
    """All tensors but those of multi-token prediction, float32."""
    raw = (checkpoint / "model.safetensors").read_bytes()
    found = {}
    for name, entry in safetensors.deserialize(raw):
        bits = {"F32": np.float32, "BF16": np.uint16}[entry["dtype"]]
        array = np.frombuffer(entry["data"], bits).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        if not name.startswith("model.mtp_"):
            found[name] = array
    return found


def _merged(weights: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Experts one by one, or with gate and up joined, become one tensor of each kind."""
    merged: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, array in weights.items():
        match = re.match(r"(.*\.experts)\.(\d+)\.(\w+)\.weight$", name)
        if match:
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = array
        elif name.endswith("experts.gate_up_proj"):
            gate, up = np.split(array, 2, axis=1)
            merged[name.replace("gate_up_proj", "gate_proj.weight")] = gate
            merged[name.replace("gate_up_proj", "up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            merged[f"{name}.weight"] = array
        else:
            merged[name] = array
    for name, experts in stacks.items():
        merged[name] = np.stack([experts[number] for number in range(len(experts))])
    return merged


def _pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (0, R/2), (1, R/2 + 1), ... of every head side by side."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _halves(name: str, array: np.ndarray, config: dict[str, Any], table: Any) -> dict[str, Any]:
    nope, width = config["qk_nope_head_dim"], config["v_head_dim"]
    heads = array.reshape(config["num_attention_heads"], nope + width, -1).astype(np.float32)
    parts = {"k_b_proj": heads[:, :nope].swapaxes(1, 2), "v_b_proj": heads[:, nope:]}
    return {
        table.get_name(
            name.replace("kv_b_proj", half), try_suffixes=(".weight",)
        ): np.ascontiguousarray(a)
        for half, a in parts.items()
    }


def _llama3_factors(config: dict[str, Any]) -> np.ndarray:
    rope = config["rope_parameters"]
    dim = config["head_dim"]
    wavelength = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    trained = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((trained / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _write_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    is_latent = "kv_lora_rank" in config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if is_latent else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if is_latent:
        _write_latent(writer, config)
    else:
        dim = config.get("head_dim") or config["hidden_size"] // heads
        writer.add_rope_dimension_count(dim)
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    count = next(
        (
            config[k]
            for k in ("moe_num_experts", "num_experts", "n_routed_experts", "num_local_experts")
            if k in config
        ),
        None,
    )
    if count is not None:
        _write_experts(writer, config, count)


def _write_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config.get("q_lora_rank") is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    if mscale := config["rope_parameters"].get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)


def _write_experts(writer: gguf.GGUFWriter, config: dict[str, Any], count: int) -> None:
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.get("moe_k", config.get("num_experts_per_tok")))
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "moe_layer_start_index" in config:
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        shared = config["moe_num_shared_experts"]
        writer.add_expert_shared_count(shared)
        writer.add_expert_shared_feed_forward_length(shared * config["moe_intermediate_size"])
    if "first_k_dense_replace" in config:
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def write_byte_tokens(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A vocabulary of single bytes and one merge, cut to the model's."""
    alphabet = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256))]
    alphabet += [chr(256 + n) for n in range(256 - len(alphabet))]
    tokens = ["<unk>", "<s>", "</s>", '!"', *alphabet][:vocab_size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str = "qwen2") -> None:
    """A tokenizer.json of byte-level BPE, as _set_vocab_gpt2 of the converter writes it."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: token for token in stored["added_tokens"]}
    ids = {**stored["model"]["vocab"], **{t: token["id"] for t, token in added.items()}}
    by_id = {number: token for token, number in ids.items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(max(by_id) + 1)]
    types = [
        5 if number not in by_id else 1 if t not in added else 3 if added[t]["special"] else 4
        for number, t in enumerate(tokens)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=len(tokens))
    special.add_to_gguf(writer, quiet=True)


def write_small(path: Path, kind: str = "F32", **changes: object) -> Path:
    """A one-block qwen2 model of random numbers; `changes` are settings below its name."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "qwen2")
    settings = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": SMALL_HIDDEN,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        **changes,
    }
    for key, value in settings.items():
        name = f"qwen2.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    write_byte_tokens(writer, SMALL_VOCAB)
    shapes = {
        "token_embd.weight": (SMALL_VOCAB, SMALL_HIDDEN),
        "output_norm.weight": (SMALL_HIDDEN,),
        "blk.0.attn_norm.weight": (SMALL_HIDDEN,),
        "blk.0.ffn_norm.weight": (SMALL_HIDDEN,),
        "blk.0.attn_q.weight": (64, SMALL_HIDDEN),
        "blk.0.attn_k.weight": (32, SMALL_HIDDEN),
        "blk.0.attn_v.weight": (32, SMALL_HIDDEN),
        "blk.0.attn_q.bias": (64,),
        "blk.0.attn_k.bias": (32,),
        "blk.0.attn_v.bias": (32,),
        "blk.0.attn_output.weight": (SMALL_HIDDEN, 64),
        "blk.0.ffn_gate.weight": (96, SMALL_HIDDEN),
        "blk.0.ffn_up.weight": (96, SMALL_HIDDEN),
        "blk.0.ffn_down.weight": (SMALL_HIDDEN, 96),
    }
    for name, shape in shapes.items():
        array = rng.standard_normal(shape, dtype=np.float32)
        choice = _type_of(kind, name, array)
        writer.add_tensor(name, quantized(array, choice), raw_dtype=choice)
    return _finished(writer, path)
