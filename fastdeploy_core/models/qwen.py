"""Qwen2 and Qwen2.5, Qwen3, and Qwen3's mixture-of-experts models (the names are transformers')."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec

from .decoder import GroupedQueryLM
from .reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.layers.builder import ModelBuilder
    from fastdeploy_core.layers.rotary import RotarySpec

    from .decoder import FeedForward, MakeFeedForward


class Qwen2ForCausalLM(GroupedQueryLM):
    """Biases on q, k and v only."""

    qkv_bias: ClassVar[str | bool] = True
    output_bias: ClassVar[str | bool] = False
    windows_everywhere: ClassVar[bool] = False

    @classmethod
    def layer(
        cls, read: ConfigReader, number: int, spec: AttentionSpec, rotary: RotarySpec
    ) -> tuple[AttentionSpec, RotarySpec]:
        """With use_sliding_window, blocks from max_window_layers on, or all, see a window."""
        if not read.flag("use_sliding_window", default=False):
            return spec, rotary
        first = 0 if cls.windows_everywhere else read.count("max_window_layers", default=28)
        window = read.window(number, default=lambda number: number >= first)
        return replace(spec, window=window), rotary


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Every query and key head is normalised."""

    head_norms = True
    qkv_bias = output_bias = "attention_bias"


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Softmax routing without shared experts or correction bias. Blocks listed in mlp_only_layers,
    or skipped by decoder_sparse_step, are dense."""

    windows_everywhere = True

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts."""
        routing = RoutingSpec(
            num_experts=read.size("num_experts", "num_local_experts"),
            top_k=read.size("num_experts_per_tok"),
            scoring="softmax",
            renormalize=read.flag("norm_topk_prob", default=False),
        )
        return read.experts(routing, dtype)

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts, or a dense block."""
        moe, width = self.moe(read, dtype), read.size("moe_intermediate_size")
        dense = super().make_feed_forward(read, dtype)
        step = read.size("decoder_sparse_step", default=1)
        dense_layers = set(read.config.get("mlp_only_layers") or [])

        def make(build: ModelBuilder, prefix: str, number: int) -> FeedForward:
            if number in dense_layers or (number + 1) % step:
                return dense(build, prefix, number)
            return build.moe_block(prefix, moe, width)

        return make
