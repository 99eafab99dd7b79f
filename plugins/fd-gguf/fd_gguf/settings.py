"""A config.json and a generation_config.json from the settings of a GGUF file.

Sizes come from the tensors where these show them; sizes that are only stated are compared with
them: a damaged number must not become a model of a billion layers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fastdeploy_core.errors import ConfigError, UnsupportedModel, WeightError

from .blocks import BlockFormat
from .families import FAMILIES, check_blocks, refuse_extras
from .names import ROPE_FACTORS, sources
from .reader import GGUFModel
from .values import Settings

METHOD: Final = "gguf"  # quant_method of the config.json made here
# Formats that equal an internal format of the engine, and its name.
PACKED: Final[dict[str, str]] = {"Q8_0": "wint8", "Q4_0": "wint4"}
_MATRICES: Final = (
    "_proj",
    "_proj_with_mqa",
    "lm_head",
)  # ends of names that a quantizer is asked for
_MAX_ROPE_FACTORS: Final = 4096
_MAX_CONTEXT: Final = 1 << 24  # larger numbers are damage: tables are made for every position
_SAMPLING: Final[dict[str, str]] = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def model_config(model: GGUFModel) -> dict[str, Any]:
    """The config.json of the same model. UnsupportedModel lists the known architectures;
    ConfigError and WeightError name the wrong setting or tensor."""
    read = Settings(model)
    if read.architecture not in FAMILIES:
        raise UnsupportedModel(
            f"{model.path} has a model of architecture {read.architecture!r:.60}; possible as "
            f"GGUF: {', '.join(FAMILIES)}"
        )
    refuse_extras(read)
    hf_class, family = FAMILIES[read.architecture]
    config = {"architectures": [hf_class], **_common(read)}
    config.update(family(read, config))
    check_blocks(read, config)
    config["torch_dtype"] = _dtype(model)
    kept = _packed_matrices(model, config)
    if kept:
        embedding = model.tensors["token_embd.weight"].format
        config["quantization_config"] = {
            "quant_method": METHOD,
            "matrices": kept,
            # A head in few bits that shares the token table: rounding it to int8 loses little.
            "rounds_head": config["tie_word_embeddings"] and not embedding.dtype,
        }
    return config


def generation_config(model: GGUFModel) -> dict[str, Any]:
    """Sampling defaults and the tokens that end an answer."""
    found: dict[str, Any] = {}
    for key, name in _SAMPLING.items():
        value = model.settings.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [model.settings.get(f"tokenizer.ggml.{name}") for name in names]
    ids = list(dict.fromkeys(i for i in ids if isinstance(i, int) and not isinstance(i, bool)))
    return {**found, "eos_token_id": ids} if ids else found


def _common(read: Settings) -> dict[str, Any]:
    hidden = read.size("embedding_length")
    embedding = read.tensor("token_embd.weight", 0, hidden)
    layers = read.size("block_count")
    layers -= read.size("nextn_predict_layers", 0, least=0)
    numbers = {name.split(".")[1] for name in read.model.tensors if name.startswith("blk.")}
    if layers < 1 or str(layers - 1) not in numbers or layers > len(numbers):
        raise WeightError(
            f"{read.model.path}: {read.architecture}.block_count asks for {layers} blocks, the "
            f"file has tensors of {len(numbers)}; finish the download"
        )
    heads, context = read.size("attention.head_count"), read.size("context_length")
    if context > _MAX_CONTEXT:
        raise ConfigError(
            f"{read.model.path}: setting {read.architecture}.context_length is {context}; expected "
            f"at most {_MAX_CONTEXT}"
        )
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": read.size("attention.head_count_kv", heads),
        "head_dim": read.size("attention.key_length", max(1, hidden // heads)),
        "intermediate_size": read.size("feed_forward_length"),
        "max_position_embeddings": context,
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": not read.has("output.weight"),
        "hidden_act": "silu",
        "rope_parameters": _rope(read),
    }


def _rope(read: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": read.number("rope.freq_base", 10000.0)}
    if read.has(ROPE_FACTORS):
        return {**found, "rope_type": "factors", "factors": _rope_factors(read)}
    kind = read.get("rope.scaling.type")
    if kind is None or (isinstance(kind, str) and kind in ("", "none")):
        return {**found, "rope_type": "default"}
    if not isinstance(kind, str) or kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{read.model.path} has rope scaling {kind!r:.60}; possible as GGUF: none, linear, yarn"
        )
    found.update(rope_type=kind, factor=read.number("rope.scaling.factor", 1.0))
    if kind == "yarn":
        found.update(_yarn(read))
    return found


def _rope_factors(read: Settings) -> list[float]:
    tensor = read.model.tensors[ROPE_FACTORS]
    if tensor.num_rows != 1 or tensor.shape[-1] > _MAX_ROPE_FACTORS:
        raise WeightError(
            f"{read.model.path}: tensor {ROPE_FACTORS} has shape {list(tensor.shape)}"
        )
    with np.errstate(all="ignore"):
        values = tensor.format.decode(tensor.rows(0, 1))[0]
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise WeightError(f"{read.model.path}: tensor {ROPE_FACTORS} holds impossible numbers")
    return [float(value) for value in values]


def _yarn(read: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {
        "original_max_position_embeddings": read.size("rope.scaling.original_context_length")
    }
    for key in ("yarn_attn_factor", "yarn_ext_factor"):
        if read.number(f"rope.scaling.{key}", 1.0) != 1.0:
            raise UnsupportedModel(
                f"{read.model.path} sets {read.architecture}.rope.scaling.{key}, which is not "
                "read; possible: the model as safetensors"
            )
    for name in ("beta_fast", "beta_slow"):
        if read.get(f"rope.scaling.yarn_{name}") is not None:
            found[name] = read.number(f"rope.scaling.yarn_{name}", 0.0)
    factor = read.number("rope.scaling.yarn_log_multiplier", 0.0)
    if read.architecture == "deepseek2" and factor:
        # The file has one number for both, times 0.1: they are equal in every release.
        found["mscale"] = found["mscale_all_dim"] = round(factor / 0.1, 6)
    return found


def _dtype(model: GGUFModel) -> str:
    """The dtype to compute in: the matrices' own if they are plain numbers, else bfloat16."""
    sizes: dict[BlockFormat, int] = {}
    for tensor in model.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.format] = sizes.get(tensor.format, 0) + tensor.nbytes
    return max(sizes, key=lambda kind: sizes[kind]).dtype or "bfloat16"


def _packed_matrices(model: GGUFModel, config: dict[str, Any]) -> dict[str, str]:
    """Matrices that can stay packed in memory, with their internal format; experts count as one."""
    found: dict[str, str] = {}
    for source in sources(model, config):
        packed = PACKED.get(source.tensor.format.name)
        name = source.name.removesuffix(".weight")
        if packed and source.up is None and len(source.shape) == 2 and name.endswith(_MATRICES):
            found[expert_free(name)] = packed
    return found


def expert_free(name: str) -> str:
    """A matrix's name without the number of its expert: all experts of a block have one format."""
    head, separator, tail = name.partition(".experts.")
    return f"{head}.experts.{tail.partition('.')[2]}" if separator else name
