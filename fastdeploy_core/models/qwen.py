"""Qwen2 and Qwen2.5, Qwen3, and Qwen3's mixture-of-experts models (the names are transformers')."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.errors import UnsupportedModel

from .decoder import GroupedQueryLM
from .reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.layers.builder import ModelBuilder

    from .decoder import FeedForward, MakeFeedForward


class Qwen2ForCausalLM(GroupedQueryLM):
    """Biases on q, k and v only."""

    qkv_bias: ClassVar[str | bool] = True
    output_bias: ClassVar[str | bool] = False

    @classmethod
    def check(cls, read: ConfigReader) -> None:
        """UnsupportedModel if a sliding window is in use: attention covers the whole context."""
        in_use = read.flag("use_sliding_window", default=False)
        kinds = read.config.get("layer_types") or []
        if in_use or any(kind != "full_attention" for kind in kinds):
            raise UnsupportedModel(
                f"this {read.architecture} uses sliding-window attention, which is not supported; "
                "possible: full attention in every layer"
            )


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Every query and key head is normalised."""

    head_norms = True
    qkv_bias = "attention_bias"
    output_bias = "attention_bias"


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Softmax routing without shared experts or correction bias. Blocks listed in mlp_only_layers,
    or skipped by decoder_sparse_step, are dense."""

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
