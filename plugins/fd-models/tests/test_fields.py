"""What of config.json is refused by its name, and what is not; no tensor library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fd_models.glm4_moe import is_dense
from fd_pooling.family import PoolingLM

from fastdeploy_core.contracts.model import StateSpec
from fastdeploy_core.errors import ConfigError, UnsupportedModel
from fastdeploy_core.models.reading import ConfigReader
from fastdeploy_core.models.shapes import read_shapes

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
}
MULTIPLIERS = {
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 16.0,
    "residual_multiplier": 0.22,
}
# Fields as released folders have them.
RELEASED: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 4096, "rope_theta": 10000.0, "attention_dropout": 0.0},
    "MixtralForCausalLM": {"num_local_experts": 8, "router_aux_loss_coef": 0.02},
    "Qwen2MoeForCausalLM": {
        "num_experts": 8,
        "shared_expert_intermediate_size": 48,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
        "norm_topk_prob": False,
    },
    "Olmo2ForCausalLM": {"attention_bias": False},
    "Olmo3ForCausalLM": {
        "attention_bias": False,
        "sliding_window": 4096,
        "rope_theta": 500000,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
    },
    "Phi3ForCausalLM": {
        "sliding_window": 2047,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        "embd_pdrop": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    },
    "Glm4MoeForCausalLM": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
    },
    "Gemma2ForCausalLM": {
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 128,
    },
    "Gemma3ForCausalLM": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 6,
    },
    "GptOssForCausalLM": {
        "attention_bias": True,
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 8,
        "quantization_config": {"quant_method": "mxfp4"},
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    "Qwen3NextForCausalLM": {
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_experts": 512,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "use_sliding_window": False,
    },
    "Llama4ForCausalLM": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 128,
        "moe_layers": [0, 1, 2, 3],
        "no_rope_layers": [1, 1, 1, 0],
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "use_qk_norm": True,
    },
    "NemotronHForCausalLM": {
        "attention_bias": False,
        "chunk_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "hybrid_override_pattern": "M-*E",
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 16,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 8,
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 1,
        "n_groups": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "routed_scaling_factor": 2.5,
        "ssm_state_size": 128,
        "time_step_limit": [0.0, float("inf")],
        "topk_group": 1,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "KimiLinearForCausalLM": {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "head_dim": 16,
            "kda_layers": [1, 2, 4],
            "num_heads": 8,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 16,
    },
    "Lfm2ForCausalLM": {
        "block_auto_adjust_ff_dim": True,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-05,
        "block_use_swiglu": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 64,
        "full_attn_idxs": [2],
        "norm_eps": 1e-05,
        "num_heads": 8,
        "use_pos_enc": True,
    },
    "GraniteMoeHybridForCausalLM": {
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "logits_scaling": 16,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 8,
        "mamba_proj_bias": False,
        "normalization_function": "rmsnorm",
        "num_local_experts": 8,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "rope_theta": 10000,
        "shared_intermediate_size": 48,
    },
    "GraniteForCausalLM": {
        **MULTIPLIERS,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
    },
    "GraniteMoeForCausalLM": {
        **MULTIPLIERS,
        "attention_bias": False,
        "num_local_experts": 40,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
    },
    "GlmForCausalLM": {"attention_bias": True, "head_dim": 8, "rms_norm_eps": 1.5625e-07},
    "Glm4ForCausalLM": {"attention_bias": True, "head_dim": 8, "partial_rotary_factor": 0.5},
    "Exaone4ForCausalLM": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
    },
    "Cohere2ForCausalLM": {
        "attention_bias": False,
        "cache_implementation": "hybrid",
        "layer_norm_eps": 1e-05,
        "layer_switch": 4,
        "logit_scale": 0.25,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rope_theta": 50000,
        "rotary_pct": 1.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
    "CohereForCausalLM": {
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "model_max_length": 131072,
        "pretraining_tp": 1,
        "rope_theta": 8000000.0,
        "use_qk_norm": False,
    },
    "Cohere2MoeForCausalLM": {
        "expert_selection_fn": "softmax",
        "first_k_dense_replace": 1,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.25,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_shared_experts": 1,
        "prefix_dense_intermediate_size": 128,
        "prefix_dense_sliding_window_pattern": 1,
        "rms_norm_eps": None,
        "rope_scaling": None,
        "rope_theta": 50000,
        "shared_expert_combination_strategy": "average",
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "Dots1ForCausalLM": {
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "max_window_layers": 62,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "rope_theta": 10000000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc",
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "ExaoneMoeForCausalLM": {
        "first_k_dense_replace": 1,
        "first_last_k_dense_replace": 1,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "n_group": 1,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_shared_experts": 1,
        "num_nextn_predict_layers": 1,
        "rope_theta": 1000000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "sliding_window": 128,
        "sliding_window_pattern": "LLLG",
        "topk_group": 1,
    },
    "HYV3ForCausalLM": {
        "attention_bias": False,
        "enable_lm_head_fp32": True,
        "enable_moe_fp32_combine": False,
        "expert_hidden_dim": 32,
        "head_dim": 8,
        "mlp_bias": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "num_experts": 8,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "qk_norm": True,
        "route_norm": True,
        "router_scaling_factor": 2.826,
    },
    "HunYuanDenseV1ForCausalLM": {
        "attention_head_dim": 8,
        "cla_share_factor": 2,
        "dense_list": [64, 0],
        "norm_type": "rms",
        "rope_scaling": {
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
        "use_cla": False,
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
    },
    "HunYuanMoEV1ForCausalLM": {
        "moe_intermediate_size": [96] * 4,
        "moe_topk": [2] * 4,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_shared_expert": [1] * 4,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
    },
    "Lfm2MoeForCausalLM": {
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_dense_layers": 2,
        "num_experts": 8,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
        "use_pos_enc": True,
    },
    "OlmoeForCausalLM": {"clip_qkv": None, "norm_topk_prob": False, "num_experts": 8},
    "SeedOssForCausalLM": {
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 16,
        "mlp_bias": False,
        "residual_dropout": 0.1,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
    },
    "SolarOpenForCausalLM": {
        "moe_intermediate_size": 32,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 1.0,
        "rope_scaling": {
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "rope_type": "yarn",
        },
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
    },
    "Gemma3ForConditionalGeneration": {
        "boi_token_index": 255999,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        "text_config": {"model_type": "gemma3_text"},
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "Gemma4ForCausalLM": {
        "attention_bias": False,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 16,
        "head_dim": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 1000,
    },
    "Mistral3ForConditionalGeneration": {
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "sliding_window": None,
        "spatial_merge_size": 2,
        "text_config": {"model_type": "mistral"},
        "vision_config": {"model_type": "pixtral"},
        "vision_feature_layer": -1,
    },
    "SmolLM3ForCausalLM": {
        "attention_bias": False,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "MiniMaxM2ForCausalLM": {
        "attn_type_list": [1, 1, 1, 1],
        "layernorm_mlp_alpha": 1.0,
        "mtp_transformer_layers": 1,
        "num_local_experts": 8,
        "qk_norm_type": "per_layer",
        "rotary_dim": 4,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "swa_rope_theta": -1.0,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
}


def config(architecture: str, **fields: Any) -> dict[str, Any]:
    return {**SIZES, **RELEASED[architecture], "architectures": [architecture], **fields}


@pytest.mark.parametrize("architecture", RELEASED)
def test_released_fields_are_known(architecture: str) -> None:
    assert read_shapes(config(architecture)).num_layers == 4


@pytest.mark.parametrize("architecture", [a for a in RELEASED if a.endswith("ForCausalLM")])
def test_prompts_of_every_family_can_be_pooled(architecture: str, tmp_path: Path) -> None:
    released = config(architecture)
    if "model_max_length" in released:
        del released["max_position_embeddings"]
    adapted = PoolingLM.adapt(tmp_path, tmp_path, released, {"convert": "embed"})
    assert PoolingLM.shapes(adapted, 1, "float32").num_layers == 4


@pytest.mark.parametrize("architecture", RELEASED)
@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("final_logit_softcapping", 30.0, "final_logit_softcapping=30.0"),
        ("attention_multiplier", 0.2, "attention_multiplier=0.2"),
        ("attention_chunk_size", 8192, "attention_chunk_size=8192"),
        ("use_parallel_residual", True, "use_parallel_residual=True"),
        ("a_norm_of_next_year", "double", "a_norm_of_next_year='double'"),
        (
            "rope_scaling",
            {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0},
            "rope_parameters.low_freq_factor=1.0",
        ),
        ("rope_scaling", {"rope_type": "ntk", "factor": 2.0}, "rope scaling 'ntk'"),
        ("layer_types", ["full_attention", "other_attention"], "layer_types"),
        ("hidden_act", "gelu", "hidden_act 'gelu'"),
    ],
)
def test_a_field_that_changes_the_answers_is_refused_by_name(
    architecture: str, key: str, value: Any, named: str
) -> None:
    fields = {key: value}
    if architecture.startswith("Granite") and key == "attention_multiplier":  # computes it
        fields, named = {"query_multiplier": 0.2}, "query_multiplier=0.2"
    if architecture.startswith("Llama4") and key == "attention_chunk_size":
        fields, named = {"attention_chunks": 8192}, "attention_chunks=8192"
    if architecture.startswith("Nemotron") and key == "hidden_act":  # has another word for it
        fields = {"mlp_hidden_act": value}
    if architecture.startswith("Gemma"):  # computes one of them, and has another word for another
        fields = {"final_logit_scale": 2.0} if key == "final_logit_softcapping" else fields
        named = "final_logit_scale=2.0" if key == "final_logit_softcapping" else named
        fields = {"hidden_activation": value} if key == "hidden_act" else fields
    with pytest.raises(UnsupportedModel) as refused:
        read_shapes(config(architecture, **fields))
    assert named in str(refused.value) and "possible:" in str(refused.value)


@pytest.mark.parametrize(
    ("architecture", "fields", "name"),
    [
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "scoring_func"),
        ("MiniMaxM2ForCausalLM", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
        ("MiniMaxM2ForCausalLM", {"qk_norm_type": "per_head"}, "qk_norm_type"),
        ("MistralForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial"),
        ("MistralForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("Qwen2MoeForCausalLM", {"qkv_bias": False}, "qkv_bias"),
        ("Llama4ForCausalLM", {"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
        ("Llama4ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ("NemotronHForCausalLM", {"residual_in_fp32": True}, "residual_in_fp32"),
        ("NemotronHForCausalLM", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        # transformers has these fields and does not use them.
        ("NemotronHForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("NemotronHForCausalLM", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("KimiLinearForCausalLM", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm"),
        ("Gemma4ForCausalLM", {"enable_moe_block": True}, "enable_moe_block"),
        ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}, "'all'"),
        (
            "Gemma4ForCausalLM",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "'yarn'",
        ),
        (
            "Mistral3ForConditionalGeneration",
            {"text_config": {"model_type": "ministral3"}},
            "'ministral3'",
        ),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv"),
        ("HunYuanMoEV1ForCausalLM", {"num_shared_expert": [2] * 4}, "num_shared_expert"),
        ("HunYuanMoEV1ForCausalLM", {"moe_intermediate_size": 48}, "moe_intermediate_size"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "use_cla"),
    ],
)
def test_what_one_family_does_not_compute(
    architecture: str, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        read_shapes(config(architecture, **fields))


LATENT: dict[str, Any] = {
    **SIZES,
    "n_routed_experts": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"indexer_types": ["full", "shared", "full", "full"]},
        {"index_topk_pattern": "FSSF"},
        {"index_topk_freq": 4},
    ],
)
def test_blocks_of_glm_5_without_an_indexer_are_refused(fields: dict[str, Any]) -> None:
    glm = {**LATENT, "architectures": ["GlmMoeDsaForCausalLM"]}
    assert read_shapes({**glm, "indexer_types": ["full"] * 4, "index_topk_freq": 1}).num_layers == 4
    with pytest.raises(UnsupportedModel, match=f"{next(iter(fields))}.*possible: "):
        read_shapes({**glm, **fields})


@pytest.mark.parametrize(
    ("architecture", "groups", "scale"),
    [
        ("DeepseekV3ForCausalLM", (8, 4), 2.5),
        ("Glm4MoeLiteForCausalLM", (1, 1), 1.8),
        ("GlmMoeDsaForCausalLM", (1, 1), 2.5),
    ],
)
def test_routing_that_config_json_leaves_out_is_that_of_transformers(
    architecture: str, groups: tuple[int, int], scale: float
) -> None:
    moe = read_shapes({**LATENT, "architectures": [architecture]}).moe
    assert moe is not None
    routing = moe.routing
    assert (routing.num_groups, routing.top_k_groups, routing.scaling_factor) == (*groups, scale)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_scaled_positions_of_qwen3_5_may_name_what_concerns_pictures(kind: str) -> None:
    rule = {"rope_type": kind, "factor": 4.0, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    fields = {**RELEASED["Qwen3NextForCausalLM"], "head_dim": 64}
    newer = {"rope_parameters": {**rule, "rope_theta": 1e7}, "rope_scaling": None}
    older = {"rope_scaling": rule, "rope_theta": 1e7}
    qwen = {**SIZES, **fields, "architectures": ["Qwen3_5MoeForCausalLM"]}
    assert read_shapes({**qwen, **newer}) == read_shapes({**qwen, **older})


@pytest.mark.parametrize("share", [0, 1.5, "half"])
def test_a_share_of_a_head_is_a_number_up_to_1(share: Any) -> None:
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        read_shapes(config("Glm4MoeForCausalLM", partial_rotary_factor=share))


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("MistralForCausalLM", {}, [4096] * 4),
        ("MistralForCausalLM", {"sliding_window": None}, [0] * 4),
        ("Qwen2MoeForCausalLM", {}, [0] * 4),
        (
            "Qwen2MoeForCausalLM",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
            [64, 0, 0, 0],
        ),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 64}, [0, 0, 0, 64]),
        ("Gemma2ForCausalLM", {}, [128, 0, 128, 0]),
        ("Olmo3ForCausalLM", {}, [4096, 4096, 4096, 0]),
        ("Cohere2ForCausalLM", {}, [4096, 4096, 4096, 0]),
        ("Exaone4ForCausalLM", {"layer_types": None, "sliding_window_pattern": 2}, [4096, 0] * 2),
        ("CohereForCausalLM", {}, [0] * 4),
        ("Gemma4ForCausalLM", {}, [512, 512, 512, 0]),
        ("Gemma4ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, [512, 512, 512, 0]),
        ("Cohere2MoeForCausalLM", {"sliding_window_pattern": 2}, [0, 4096, 0, 4096]),
        ("ExaoneMoeForCausalLM", {}, [128, 128, 128, 0]),
        ("Dots1ForCausalLM", {}, [0] * 4),
        (
            "Exaone4ForCausalLM",
            {"layer_types": ["full_attention"] * 4, "sliding_window": None},
            [0] * 4,
        ),
        ("Gemma3ForCausalLM", {}, [128, 128, 128, 128]),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 2}, [128, 0, 128, 0]),
        ("GptOssForCausalLM", {}, [128, 0, 128, 0]),
        (
            "GptOssForCausalLM",
            {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            [0, 0, 0, 128],
        ),
    ],
)
def test_which_blocks_have_a_window(
    architecture: str, fields: dict[str, Any], windows: list[int]
) -> None:
    layers = read_shapes(config(architecture, **fields)).layers
    assert [layer.window for layer in layers] == windows


@pytest.mark.parametrize(
    ("architecture", "windows"),
    [
        ("MistralForCausalLM", [4096] * 4),
        ("MixtralForCausalLM", [0] * 4),
        ("Gemma2ForCausalLM", [4096, 0, 4096, 0]),
        ("GptOssForCausalLM", [128, 0, 128, 0]),
    ],
)
def test_a_window_that_config_json_leaves_out_is_that_of_transformers(
    architecture: str, windows: list[int]
) -> None:
    fields = config(architecture, layer_types=None)
    fields.pop("sliding_window", None)
    assert [layer.window for layer in read_shapes(fields).layers] == windows
    assert {layer.window for layer in read_shapes({**fields, "sliding_window": None}).layers} == {0}


def test_which_blocks_are_dense() -> None:
    def dense(**fields: Any) -> list[int]:
        read = ConfigReader(config("ExaoneMoeForCausalLM", **fields))
        return [number for number in range(6) if is_dense(read, number)]

    kinds = ["sparse", "dense", "sparse", "dense"]
    assert dense() == [0] and dense(mlp_layer_types=kinds) == [1, 3]  # 4 and 5 are a drafter's
    assert dense(mlp_layer_types=None, first_k_dense_replace=2) == [0, 1]
    for wrong in (kinds[:3], ["dense", "moe", "moe", "moe"], "dense"):
        with pytest.raises(ConfigError, match=r"mlp_layer_types.*expected dense or sparse"):
            dense(mlp_layer_types=wrong)


def test_blocks_of_gemma_4_without_keys_keep_nothing() -> None:
    def widths(**fields: Any) -> list[tuple[int, int]]:
        layers = read_shapes(config("Gemma4ForCausalLM", **fields)).layers
        return [(layer.num_kv_heads, layer.head_dim) for layer in layers]  # type: ignore[union-attr]

    kinds = ["sliding_attention", "full_attention"] * 2
    assert widths(layer_types=kinds) == [(2, 8), (2, 16)] * 2
    assert widths(layer_types=kinds, num_kv_shared_layers=2) == [(2, 8), (2, 16)]
    same = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    assert widths(layer_types=kinds, **same)[:2] == [(2, 8), (1, 16)]
    # In the words of transformers.
    newer = {"1": {"head_dim": 24, "num_key_value_heads": 4}}
    assert widths(layer_types=kinds, per_layer_config=newer)[1] == (4, 24)
    with pytest.raises(ConfigError, match="num_kv_shared_layers=3"):
        widths(layer_types=kinds, num_kv_shared_layers=3)


def test_which_blocks_of_llama_4_have_chunks() -> None:
    def chunks(**fields: Any) -> list[int]:
        return [layer.chunk for layer in read_shapes(config("Llama4ForCausalLM", **fields)).layers]

    assert chunks() == chunks(no_rope_layers=None) == [8192, 8192, 8192, 0]
    assert chunks(no_rope_layers=None, no_rope_layer_interval=2) == [8192, 0, 8192, 0]
    kinds = ["full_attention"] * 2 + ["chunked_attention"] * 2
    assert chunks(layer_types=kinds, attention_chunk_size=64) == [0, 0, 64, 64]


def test_gemma_3_is_the_same_in_the_words_of_older_and_of_newer_transformers() -> None:
    older = config("Gemma3ForCausalLM", num_hidden_layers=7)
    newer = {k: v for k, v in older.items() if not k.startswith("rope") and "pattern" not in k}
    newer["layer_types"] = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    newer["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert read_shapes(newer) == read_shapes(older)
    newer["rope_parameters"]["sliding_attention"]["rope_type"] = "yarn"
    with pytest.raises(UnsupportedModel, match="'yarn' for blocks with a window"):
        read_shapes(newer)


def test_which_blocks_keep_a_state() -> None:
    def kinds(architecture: str, **fields: Any) -> list[str]:
        layers = read_shapes(config(architecture, num_hidden_layers=5, **fields)).layers
        return ["state" if isinstance(layer, StateSpec) else "attention" for layer in layers]

    usual = ["state", "state", "state", "attention", "state"]
    types = {"layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"]}
    assert kinds("Qwen3NextForCausalLM") == kinds("Qwen3NextForCausalLM", **types) == usual
    assert kinds("Qwen3NextForCausalLM", full_attention_interval=5)[3:] == ["state", "attention"]
    assert kinds("Lfm2ForCausalLM") == ["state", "state", "attention", "state", "state"]
    assert kinds("KimiLinearForCausalLM") == ["state", "state", "attention", "state", "state"]
    types = {"layer_types": ["mamba", "attention", "linear_attention", "full_attention", "mamba"]}
    with pytest.raises(UnsupportedModel, match="possible: attention or full_attention or linear"):
        kinds("GraniteMoeHybridForCausalLM", layer_types=["conv"] * 5)
    assert kinds("GraniteMoeHybridForCausalLM", **types)[::2] == ["state"] * 3


def test_blocks_of_nemotron_h_keep_something_or_nothing() -> None:
    def kinds(**fields: Any) -> list[str]:
        layers = read_shapes(config("NemotronHForCausalLM", **fields)).layers
        return ["state" if isinstance(layer, StateSpec) else "attention" for layer in layers]

    words = ["linear_attention", "mlp", "full_attention", "moe"]
    assert kinds() == kinds(layers_block_type=words) == ["state", "attention"]
    assert kinds(hybrid_override_pattern="*-MM") == ["attention", "state", "state"]
    with pytest.raises(UnsupportedModel, match="layer_types"):
        kinds(hybrid_override_pattern="MX*E")


def test_heads_of_states_are_divided_among_ranks_or_refused() -> None:
    one, two = (read_shapes(config("Qwen3NextForCausalLM"), n).layers[0] for n in (1, 2))
    assert isinstance(one, StateSpec) and isinstance(two, StateSpec)
    assert one.conv_parts == (2048, 2048, 4096) and two.conv_parts == (1024, 1024, 2048)
    assert (two.num_heads, two.num_key_heads) == (16, 8)
    with pytest.raises(ConfigError, match=r"linear_num_key_heads 6 .* tensor_parallel_size 4"):
        read_shapes(
            config(
                "Qwen3NextForCausalLM",
                linear_num_key_heads=6,
                linear_num_value_heads=12,
                num_key_value_heads=4,
            ),
            4,
        )
    with pytest.raises(ConfigError, match="expected a multiple of linear_num_key_heads 3"):
        read_shapes(config("Qwen3NextForCausalLM", linear_num_key_heads=3))
    for family in ("GraniteMoeHybridForCausalLM", "NemotronHForCausalLM"):
        with pytest.raises(UnsupportedModel, match="possible: --tensor-parallel-size 1"):
            read_shapes(config(family), 2)
