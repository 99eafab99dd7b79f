"""Qwen3 mixture-of-experts models (transformers: Qwen3MoeForCausalLM).

Attention as in Qwen3; softmax routing without shared experts or correction bias. Blocks listed in
mlp_only_layers, or skipped by decoder_sparse_step, are dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.model import ModelShapes
from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec

from .decoder import DecoderLM, FeedForward
from .reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.layers.builder import ModelBuilder


def _moe(read: ConfigReader, dtype: str) -> MoESpec:
    routing = RoutingSpec(
        num_experts=read.size("num_experts", "num_local_experts"),
        top_k=read.size("num_experts_per_tok"),
        scoring="softmax",
        renormalize=read.flag("norm_topk_prob", default=False),
    )
    width = read.divided("moe_intermediate_size", read.size("moe_intermediate_size"))
    return MoESpec(routing, read.size("hidden_size"), width, dtype)


class Qwen3MoeForCausalLM(DecoderLM):
    """Grouped-query attention with query and key norms; experts, or a dense block."""

    @staticmethod
    def shapes(config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        read = ConfigReader(config, tp_size)
        read.require_silu()
        read.refuse_sliding_window()
        read.rotary(read.head_dim())
        read.divided("intermediate_size", read.size("intermediate_size"))
        return read.shapes(read.gqa(dtype, head_norms=True), _moe(read, dtype))

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        heads, spec, rotary = (
            read.heads(),
            read.gqa(build.dtype, head_norms=True),
            read.rotary(read.head_dim()),
        )
        moe, width = _moe(read, build.dtype), read.size("moe_intermediate_size")
        intermediate = read.size("intermediate_size")
        step = read.size("decoder_sparse_step", default=1)
        dense_layers = set(config.get("mlp_only_layers") or [])
        bias = read.flag("attention_bias", default=False)
        eps = read.number("rms_norm_eps", default=1e-6)

        def feed_forward(build: ModelBuilder, prefix: str, number: int) -> FeedForward:
            if number in dense_layers or (number + 1) % step:
                return build.mlp(prefix, heads.hidden, intermediate)
            return build.moe_block(prefix, moe, width)

        super().__init__(
            read,
            build,
            attention=lambda build, prefix: build.gqa(
                prefix, heads, spec, rotary, qkv_bias=bias, output_bias=bias, norm_eps=eps
            ),
            feed_forward=feed_forward,
        )
