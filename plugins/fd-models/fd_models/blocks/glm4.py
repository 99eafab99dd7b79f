"""GLM-4 (transformers: GlmForCausalLM, Glm4ForCausalLM). Checkpoints hold gate and up joined."""

from __future__ import annotations

from fd_models.fields import StrictLM
from fd_models.gemma2 import FourNormLM


class GlmForCausalLM(StrictLM):
    """GLM-4-9B of 2024: Llama whose heads turn in part, neighbouring channels together."""

    norm_eps = 1.5625e-07
    output_bias = False
    interleaved = True
    partial_rotary = 0.5
    defaults = {"attention_bias": True}  # noqa: RUF012 - never changed
    reads = frozenset({"partial_rotary_factor"})


class Glm4ForCausalLM(FourNormLM, GlmForCausalLM):
    """GLM-4-0414: each branch is normed once more before it is added."""

    norm_names = "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
