"""What each GGUF architecture adds to a config.json, and which tensors confirm its sizes.

Keys are llama.cpp's names of architectures. A file states sizes; they are used only if its tensors
have them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastdeploy_core.errors import ConfigError, UnsupportedModel, WeightError

from .names import ROPE_FACTORS
from .values import Settings

_SIGMOID: Final = 2
# Settings that change what a model computes and that no family here supports.
_REFUSED: Final = (
    "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "residual_scale",
    "embedding_scale", "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias",
    "rope.scaling.alpha", "expert_group_scale",
)  # fmt: skip


def _ernie(read: Settings, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": read.has("blk.0.attn_output.bias")}


def _ernie_moe(read: Settings, config: dict[str, Any]) -> dict[str, Any]:
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


def _shared_experts(read: Settings) -> int:
    """The joint width of the shared experts, as a number of experts."""
    name = next((n for n in read.model.tensors if n.endswith(".ffn_gate_shexp.weight")), None)
    if name is None:
        return 0
    return read.model.tensors[name].shape[0] // read.size("expert_feed_forward_length")


def _qwen3_moe(read: Settings, config: dict[str, Any]) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    return {
        **_qwen3(read, config),
        "num_experts": read.size("expert_count"),
        "num_experts_per_tok": read.size("expert_used_count"),
        "moe_intermediate_size": read.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [n for n in layers if not read.has(f"blk.{n}.ffn_gate_inp.weight")],
    }


def _qwen2(read: Settings, config: dict[str, Any]) -> dict[str, Any]:
    return {}


def _qwen3(read: Settings, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": read.has("blk.0.attn_q.bias")}


def _llama(read: Settings, config: dict[str, Any]) -> dict[str, Any]:
    if read.has("blk.0.ffn_gate_inp.weight"):
        raise UnsupportedModel(f"{read.model.path} is a Llama with experts; possible: dense ones")
    return {
        "attention_bias": read.has("blk.0.attn_q.bias"),
        "mlp_bias": read.has("blk.0.ffn_gate.bias"),
    }


def _deepseek(read: Settings, config: dict[str, Any]) -> dict[str, Any]:
    gating = read.size("expert_gating_func", 0, least=0)
    if gating != _SIGMOID and not (
        gating == 0 and any(".exp_probs_b." in name for name in read.model.tensors)
    ):
        raise UnsupportedModel(
            f"{read.model.path} is a DeepSeek that routes without sigmoid scores (V2); possible: "
            "V3, R1"
        )
    rope, rank = read.size("rope.dimension_count"), read.size("attention.kv_lora_rank")
    has_q_rank = read.get("attention.q_lora_rank") is not None
    key = "attention.key_length_mla"
    key_dim = read.size(key if read.get(key) is not None else "attention.key_length")
    value = "attention.value_length_mla"
    value_dim = read.size(value if read.get(value) is not None else "attention.value_length")
    if key_dim <= rope:
        raise ConfigError(
            f"{read.model.path}: {read.architecture}.{key} is {key_dim}, rope alone {rope}"
        )
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


FAMILIES: Final[dict[str, tuple[str, Callable[[Settings, dict[str, Any]], dict[str, Any]]]]] = {
    "ernie4_5": ("Ernie4_5ForCausalLM", _ernie),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", _ernie_moe),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "llama": ("LlamaForCausalLM", _llama),
    "deepseek2": ("DeepseekV3ForCausalLM", _deepseek),
}


def refuse_extras(read: Settings) -> None:
    """UnsupportedModel for a file with a setting that would otherwise be ignored."""
    asked = [key for key in _REFUSED if read.number(key, 0.0) != 0]
    window = read.size("attention.sliding_window", 0, least=0)
    if 0 < window < read.size("context_length"):
        asked.append("attention.sliding_window")
    if asked:
        raise UnsupportedModel(
            f"{read.model.path} sets {', '.join(asked)}, which this {read.architecture} is not "
            "served with; possible: models without"
        )


def check_blocks(read: Settings, config: dict[str, Any]) -> None:
    """Check that the first blocks' tensors have the sizes of the settings."""
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
                f"{read.model.path}: heads of {dim} numbers of which {rotated} are rotated, with "
                f"values of {value_dim}; possible: heads that are rotated as a whole, with "
                "values as wide"
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


def _check_routing(read: Settings, config: dict[str, Any], count: int) -> None:
    used = config.get("moe_k") or config["num_experts_per_tok"]
    groups, used_groups = config.get("n_group", 1), config.get("topk_group", 1)
    if used > count or count % groups or used_groups > groups:
        raise ConfigError(
            f"{read.model.path}: {used} of {count} experts from {used_groups} of {groups} groups "
            "cannot be chosen; settings expert_used_count, expert_count, expert_group_used_count "
            "and expert_group_count do not fit together"
        )
