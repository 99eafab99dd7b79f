"""Models of real sizes with random weights, and the demo model: a safetensors folder, and GGUF
files of the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[3]
DEMO: Final = "ernie-tiny"
_TOKENS: Final = ("<unk>", "<s>", "</s>", '!"')
_COMMON: Final[dict[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "head_dim": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
}


@dataclass(frozen=True)
class Shape:
    """One model: its config.json, and what llama.cpp calls its architecture."""

    gguf: str
    config: dict[str, Any]


SHAPES: Final[dict[str, Shape]] = {
    "ernie-4.5-0.3b": Shape(
        "ernie4_5",
        {
            **_COMMON,
            "architectures": ["Ernie4_5ForCausalLM"],
            "model_type": "ernie4_5",
            "vocab_size": 103424,
            "num_hidden_layers": 18,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "use_bias": False,
        },
    ),
    "qwen3-0.6b": Shape(
        "qwen3",
        {
            **_COMMON,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 151936,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "attention_bias": False,
        },
    ),
}


NAMES: Final = (*SHAPES, DEMO)


def vocab_size(name: str) -> int:
    """Of the model."""
    if name == DEMO:
        return int(json.loads((ROOT / "models" / DEMO / "config.json").read_text())["vocab_size"])
    return int(SHAPES[name].config["vocab_size"])


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensors by name."""
    hidden, width, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}"
        found |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (q, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, q),
            f"{prefix}.mlp.gate_proj.weight": (width, hidden),
            f"{prefix}.mlp.up_proj.weight": (width, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, width),
        }
        if config["model_type"] == "qwen3":
            found[f"{prefix}.self_attn.q_norm.weight"] = (dim,)
            found[f"{prefix}.self_attn.k_norm.weight"] = (dim,)
    return found


def _bits(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """bfloat16 bits of N(0, 0.02), or of ones for norms; the same for a name at any time."""
    if len(shape) == 1:
        return np.full(shape, 0x3F80, np.uint16)
    seed = list(name.encode())
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    values *= np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write_folder(name: str, folder: Path) -> Path:
    """config.json, tokenizer.json and one safetensors file; kept if it is there, as the demo model
    is."""
    if name == DEMO:
        return ROOT / "models" / DEMO
    if (folder / "tokenizer.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name].config
    header: dict[str, Any] = {}
    position = 0
    for tensor, shape in _shapes(config).items():
        stop = position + 2 * int(np.prod(shape))
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, stop]}
        position = stop
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        shapes = _shapes(config)
        with ThreadPoolExecutor() as pool:
            for bits in pool.map(_bits, shapes, shapes.values()):
                file.write(bits)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(config["vocab_size"])))
    return folder


def _tokens(vocab_size: int) -> list[str]:
    """A byte-level vocabulary: special tokens, bytes, and names that no text has."""
    alphabet = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256))]
    alphabet += [chr(256 + n) for n in range(256 - len(alphabet))]
    tokens = [*_TOKENS, *alphabet]
    return tokens + [f"[PAD{n}]" for n in range(len(tokens), vocab_size)]


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": True,
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": n, "content": _TOKENS[n], **flags, "special": True} for n in range(3)
        ],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {token: n for n, token in enumerate(_tokens(vocab_size))},
            "merges": [["!", '"']],
        },
    }


def write_gguf(name: str, target: Path) -> Path:
    """The same numbers as a bfloat16 GGUF file; kept if it is there."""
    if target.is_file():
        return target
    if name == DEMO:
        sys.path.insert(0, str(ROOT))
        from tests.gguf_files import write_gguf as convert

        folder = write_folder(name, target)
        convert(folder, target, "BF16", tokenizer=folder)
        return target
    import gguf

    stored = np.memmap(
        write_folder(name, target.with_name(name)) / "model.safetensors", np.uint8, "r"
    )
    position = 8 + int(stored[:8].view(np.uint64)[0])
    shape, part = SHAPES[name], target.with_suffix(".part")
    config = shape.config
    writer = gguf.GGUFWriter(part, shape.gguf)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = _tokens(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257 + [5] * (len(tokens) - 260))
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    architecture = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[shape.gguf]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    kinds = gguf.GGMLQuantizationType
    for tensor, dims in _shapes(config).items():
        bits = stored[position : position + 2 * int(np.prod(dims))]
        position += len(bits)
        new = names.get_name(tensor, try_suffixes=(".weight",))
        if len(dims) == 1:
            writer.add_tensor(new, (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(new, bits.reshape(dims[0], -1), raw_dtype=kinds.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(target)


def quantized(source: Path, kind: str, tool: Path, threads: int) -> Path:
    """The file in another of llama.cpp's formats, made with llama-quantize; kept if it is there."""
    target = source.with_name(source.name.replace("bf16", kind))
    if not target.is_file():
        part = target.with_suffix(".part")
        command = [str(tool), str(source), str(part), kind, str(threads)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        part.rename(target)
    return target
