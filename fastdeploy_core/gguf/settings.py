"""A config.json and a generation_config.json from the settings of a GGUF file.

Sizes come from the tensors where these show them, and what is only stated is held against them: a
damaged number must not become a model of a billion layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from fastdeploy_core.errors import ConfigError, UnsupportedModel, WeightError

from .blocks import BlockFormat
from .names import ROPE_FACTORS, sources
from .reader import GGUFModel, GGUFTensor

METHOD: Final = "gguf"  # quant_method of the config.json made here
# Formats that are an internal format of the engine as they are, by the name of that.
PACKED: Final[dict[str, str]] = {"Q8_0": "wint8", "Q4_0": "wint4"}
_MATRICES: Final = ("_proj", "_proj_with_mqa", "lm_head")  # ends of names that a quantizer is asked for
_SIGMOID: Final = 2
_MAX_ROPE_FACTORS: Final = 4096
_MAX_CONTEXT: Final = 1 << 24  # more is damage: tables are made for every position
_SAMPLING: Final[dict[str, str]] = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class _Settings:
    """Typed access to the settings below the architecture's name."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        self.architecture = str(model.settings.get("general.architecture", ""))

    def get(self, key: str) -> Any:
        return self.model.settings.get(f"{self.architecture}.{key}")

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(key)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()  # one for every block, and all are equal
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            shown = value.tolist()[:8] if isinstance(value, np.ndarray) else value
            raise ConfigError(
                f"{self.model.path}: setting {self.architecture}.{key} is {shown!r:.60}; expected a whole "
                f"number from {least} up, the same for every block"
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value):
            raise ConfigError(
                f"{self.model.path}: setting {self.architecture}.{key} is {value!r:.60}; expected a number"
            )
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(
                f"{self.model.path}: setting {self.architecture}.{key} is {value!r:.60}; expected true or "
                "false"
            )
        return bool(value)

    def tensor(self, name: str, *shape: int) -> GGUFTensor:
        """A tensor that must be there; 0 in `shape` stands for any size."""
        found = self.model.tensors.get(name)
        if found is None:
            raise WeightError(f"{self.model.path} has no tensor {name}; finish the download")
        fits = len(found.shape) == len(shape) and all(
            not wanted or wanted == size for wanted, size in zip(shape, found.shape, strict=True)
        )
        if not fits:
            raise WeightError(
                f"{self.model.path}: tensor {name} has shape {list(found.shape)}; the settings of the "
                f"file ask for {[size or 'any' for size in shape]}"
            )
        return found

    def has(self, name: str) -> bool:
        return name in self.model.tensors


def model_config(model: GGUFModel) -> dict[str, Any]:
    """What config.json of the same model would say. UnsupportedModel names the architectures there
    are; ConfigError and WeightError name the setting or tensor that is wrong."""
    read = _Settings(model)
    if read.architecture not in _FAMILIES:
        raise UnsupportedModel(
            f"{model.path} has a model of architecture {read.architecture!r:.60}; possible as GGUF: "
            f"{', '.join(_FAMILIES)}"
        )
    hf_class, family = _FAMILIES[read.architecture]
    config = {"architectures": [hf_class], **_common(read)}
    config.update(family(read, config))
    _check_block(read, config)
    config["torch_dtype"] = _dtype(model)
    kept = _packed_matrices(model, config)
    if kept:
        config["quantization_config"] = {"quant_method": METHOD, "matrices": kept}
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


def _common(read: _Settings) -> dict[str, Any]:
    hidden = read.size("embedding_length")
    embedding = read.tensor("token_embd.weight", 0, hidden)
    layers = read.size("block_count")
    layers -= read.size("nextn_predict_layers", 0, least=0)
    numbers = {name.split(".")[1] for name in read.model.tensors if name.startswith("blk.")}
    if layers < 1 or str(layers - 1) not in numbers or layers > len(numbers):
        raise WeightError(
            f"{read.model.path}: {read.architecture}.block_count asks for {layers} blocks, the file has "
            f"tensors of {len(numbers)}; finish the download"
        )
    heads, context = read.size("attention.head_count"), read.size("context_length")
    if context > _MAX_CONTEXT:
        raise ConfigError(
            f"{read.model.path}: setting {read.architecture}.context_length is {context}; expected at most "
            f"{_MAX_CONTEXT}"
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


def _rope(read: _Settings) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": read.number("rope.freq_base", 10000.0)}
    if read.has(ROPE_FACTORS):
        return {**found, "rope_type": "factors", "factors": _rope_factors(read)}
    kind = read.get("rope.scaling.type")
    if kind is None or isinstance(kind, str) and kind in ("", "none"):
        return {**found, "rope_type": "default"}
    if not isinstance(kind, str) or kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{read.model.path} has rope scaling {kind!r:.60}; possible as GGUF: none, linear, yarn"
        )
    found.update(rope_type=kind, factor=read.number("rope.scaling.factor", 1.0))
    if kind == "yarn":
        found.update(_yarn(read))
    return found


def _rope_factors(read: _Settings) -> list[float]:
    tensor = read.model.tensors[ROPE_FACTORS]
    if tensor.num_rows != 1 or tensor.shape[-1] > _MAX_ROPE_FACTORS:
        raise WeightError(f"{read.model.path}: tensor {ROPE_FACTORS} has shape {list(tensor.shape)}")
    with np.errstate(all="ignore"):
        values = tensor.format.decode(tensor.rows(0, 1))[0]
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise WeightError(f"{read.model.path}: tensor {ROPE_FACTORS} holds impossible numbers")
    return [float(value) for value in values]


def _yarn(read: _Settings) -> dict[str, Any]:
    found: dict[str, Any] = {
        "original_max_position_embeddings": read.size("rope.scaling.original_context_length")
    }
    for key in ("yarn_attn_factor", "yarn_ext_factor"):
        if read.number(f"rope.scaling.{key}", 1.0) != 1.0:
            raise UnsupportedModel(
                f"{read.model.path} sets {read.architecture}.rope.scaling.{key}, which is not read; "
                "possible: the model as safetensors"
            )
    for name in ("beta_fast", "beta_slow"):
        if read.get(f"rope.scaling.yarn_{name}") is not None:
            found[name] = read.number(f"rope.scaling.yarn_{name}", 0.0)
    factor = read.number("rope.scaling.yarn_log_multiplier", 0.0)
    if read.architecture == "deepseek2" and factor:
        # The file has one number for both, times 0.1: they are equal in every release.
        found["mscale"] = found["mscale_all_dim"] = round(factor / 0.1, 6)
    return found


def _ernie(read: _Settings, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": read.has("blk.0.attn_output.bias")}


def _ernie_moe(read: _Settings, config: dict[str, Any]) -> dict[str, Any]:
    first = read.size("leading_dense_block_count", 0, least=0)
    return {
        **_ernie(read, config),
        "moe_num_experts": read.size("expert_count"),
        "moe_k": read.size("expert_used_count"),
        "moe_layer_interval": read.size("interleave_moe_layer_step", 1),
        "moe_layer_start_index": first,
        "moe_intermediate_size": read.size("expert_feed_forward_length"),
        "moe_num_shared_experts": _shared_experts(read),
        "moe_use_aux_free": any(".exp_probs_b." in name for name in read.model.tensors),
    }


def _shared_experts(read: _Settings) -> int:
    """How many experts' widths the shared ones have together."""
    name = next((n for n in read.model.tensors if n.endswith(".ffn_gate_shexp.weight")), None)
    if name is None:
        return 0
    return read.model.tensors[name].shape[0] // read.size("expert_feed_forward_length")


def _qwen3_moe(read: _Settings, config: dict[str, Any]) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    return {
        **_qwen3(read, config),
        "num_experts": read.size("expert_count"),
        "num_experts_per_tok": read.size("expert_used_count"),
        "moe_intermediate_size": read.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [n for n in layers if not read.has(f"blk.{n}.ffn_gate_inp.weight")],
    }


def _qwen2(read: _Settings, config: dict[str, Any]) -> dict[str, Any]:
    return {}


def _qwen3(read: _Settings, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": read.has("blk.0.attn_q.bias")}


def _llama(read: _Settings, config: dict[str, Any]) -> dict[str, Any]:
    if read.has("blk.0.ffn_gate_inp.weight"):
        raise UnsupportedModel(f"{read.model.path} is a Llama with experts; possible: dense ones")
    return {
        "attention_bias": read.has("blk.0.attn_q.bias"),
        "mlp_bias": read.has("blk.0.ffn_gate.bias"),
    }


def _deepseek(read: _Settings, config: dict[str, Any]) -> dict[str, Any]:
    gating = read.size("expert_gating_func", 0, least=0)
    if gating != _SIGMOID and not (
        gating == 0 and any(".exp_probs_b." in name for name in read.model.tensors)
    ):
        raise UnsupportedModel(
            f"{read.model.path} is a DeepSeek that routes without sigmoid scores (V2); possible: V3, R1"
        )
    rope, rank = read.size("rope.dimension_count"), read.size("attention.kv_lora_rank")
    has_q_rank = read.get("attention.q_lora_rank") is not None
    key = "attention.key_length_mla"
    key_dim = read.size(key if read.get(key) is not None else "attention.key_length")
    value = "attention.value_length_mla"
    value_dim = read.size(value if read.get(value) is not None else "attention.value_length")
    if key_dim <= rope:
        raise ConfigError(f"{read.model.path}: {read.architecture}.{key} is {key_dim}, rope alone {rope}")
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope,
        "q_lora_rank": read.size("attention.q_lora_rank") if has_q_rank else None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key_dim - rope,
        "v_head_dim": value_dim,
        "rope_interleave": True,
        "attention_bias": read.has("blk.0.attn_kv_a_mqa.bias"),
        "n_routed_experts": read.size("expert_count"),
        "num_experts_per_tok": read.size("expert_used_count"),
        "n_shared_experts": _shared_experts(read),
        "moe_intermediate_size": read.size("expert_feed_forward_length"),
        "first_k_dense_replace": read.size("leading_dense_block_count", 0, least=0),
        "n_group": read.size("expert_group_count", 1),
        "topk_group": read.size("expert_group_used_count", 1),
        "routed_scaling_factor": read.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": read.flag("expert_weights_norm"),
    }


_FAMILIES: Final[
    dict[str, tuple[str, Callable[[_Settings, dict[str, Any]], dict[str, Any]]]]
] = {
    "ernie4_5": ("Ernie4_5ForCausalLM", _ernie),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", _ernie_moe),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "llama": ("LlamaForCausalLM", _llama),
    "deepseek2": ("DeepseekV3ForCausalLM", _deepseek),
}


def _check_block(read: _Settings, config: dict[str, Any]) -> None:
    """The first blocks' tensors have the sizes that the settings state."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        read.tensor("blk.0.attn_kv_a_mqa.weight", latent, hidden)
        read.tensor("blk.0.attn_output.weight", hidden, heads * config["v_head_dim"])
        q_name, q_in = "attn_q", hidden
        if config["q_lora_rank"] is not None:
            q_name, q_in = "attn_q_b", config["q_lora_rank"]
        q_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        read.tensor(f"blk.0.{q_name}.weight", heads * q_dim, q_in)
    else:
        dim = config["head_dim"]
        rotated = read.size("rope.dimension_count", dim)
        value_dim = read.size("attention.value_length", dim)
        if (rotated, value_dim) != (dim, dim):
            raise UnsupportedModel(
                f"{read.model.path}: heads of {dim} numbers of which {rotated} are rotated, with values "
                f"of {value_dim}; possible: heads that are rotated as a whole, with values as wide"
            )
        if not read.has("blk.0.attn_qkv.weight"):
            read.tensor("blk.0.attn_q.weight", heads * dim, hidden)
            read.tensor("blk.0.attn_k.weight", config["num_key_value_heads"] * dim, hidden)
    factors = config["rope_parameters"].get("factors")
    if factors is not None and 2 * len(factors) != config["head_dim"]:
        raise WeightError(
            f"{read.model.path}: tensor {ROPE_FACTORS} has {len(factors)} numbers for heads of "
            f"{config['head_dim']}"
        )
    experts = next((n for n in read.model.tensors if n.endswith(".ffn_gate_exps.weight")), "")
    count = config.get("moe_num_experts", config.get("num_experts", config.get("n_routed_experts")))
    if count is not None:
        name = experts or "blk.N.ffn_gate_exps.weight"
        read.tensor(name, count, config["moe_intermediate_size"], hidden)
        _check_routing(read, config, count)
    dense = next((n for n in read.model.tensors if n.endswith(".ffn_gate.weight")), "")
    if dense or count is None:
        read.tensor(dense or "blk.0.ffn_gate.weight", config["intermediate_size"], hidden)


def _check_routing(read: _Settings, config: dict[str, Any], count: int) -> None:
    used = config.get("moe_k", config.get("num_experts_per_tok"))
    groups, used_groups = config.get("n_group", 1), config.get("topk_group", 1)
    if used > count or count % groups or used_groups > groups:
        raise ConfigError(
            f"{read.model.path}: {used} of {count} experts from {used_groups} of {groups} groups cannot be"
            " chosen; settings expert_used_count, expert_count, expert_group_used_count and "
            "expert_group_count do not fit together"
        )


def _dtype(model: GGUFModel) -> str:
    """The dtype to compute in: of the matrices where these are plain numbers, else bfloat16."""
    sizes: dict[BlockFormat, int] = {}
    for tensor in model.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.format] = sizes.get(tensor.format, 0) + tensor.nbytes
    return max(sizes, key=lambda kind: sizes[kind]).dtype or "bfloat16"


def _packed_matrices(model: GGUFModel, config: dict[str, Any]) -> dict[str, str]:
    """Matrices that can stay as they are in memory, with their internal format; experts as one."""
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
