"""GLM-4 (transformers: GlmForCausalLM, Glm4ForCausalLM). Checkpoints hold gate and up joined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fd_models.fields import StrictLM
from fd_models.gemma2 import FourNormLayer

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import Block


class GlmForCausalLM(StrictLM):
    """GLM-4-9B of 2024: Llama whose heads turn in part, neighbouring channels together."""

    norm_eps = 1.5625e-07
    output_bias = False
    interleaved = True
    partial_rotary = 0.5
    defaults = {"attention_bias": True}  # noqa: RUF012 - never changed
    reads = frozenset({"partial_rotary_factor"})


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: each branch is normed once more before it is added."""

    def block(self, build: ModelBuilder, prefix: str, number: int) -> Block:
        """One block with that checkpoint prefix."""
        size, eps = self._hidden, self._eps
        feed_forward: Any = self._feed_forward(build, f"{prefix}.mlp", number)
        return FourNormLayer(
            input_norm=build.norm(f"{prefix}.input_layernorm", size, eps),
            attention=self._attention(build, f"{prefix}.self_attn", number),
            post_attention_norm=build.norm(f"{prefix}.post_self_attn_layernorm", size, eps),
            pre_feed_forward_norm=build.norm(f"{prefix}.post_attention_layernorm", size, eps),
            feed_forward=feed_forward,
            post_feed_forward_norm=build.norm(f"{prefix}.post_mlp_layernorm", size, eps),
            select_rows=build.kernels["select_rows"],
        )
