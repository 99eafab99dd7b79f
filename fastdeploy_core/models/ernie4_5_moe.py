"""ERNIE 4.5 mixture-of-experts models (transformers: Ernie4_5_MoeForCausalLM).

Softmax routing with a correction bias that changes the choice of experts but not their weights;
shared experts in addition to the routed ones; dense blocks outside
moe_layer_start_index..moe_layer_end_index. Multi-token-prediction weights (model.mtp_*) are kept in
`mtp_weights` for a drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.model import ModelShapes
from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec

from .decoder import DecoderLM, FeedForward
from .ernie4_5 import ROPE_THETA
from .reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.layers.builder import ModelBuilder


def _moe(read: ConfigReader, dtype: str) -> MoESpec:
    routing = RoutingSpec(
        num_experts=read.size("moe_num_experts", "num_experts"),
        top_k=read.size("moe_k", "num_experts_per_tok"),
        scoring="softmax",
        renormalize=True,
        has_correction_bias=read.flag("moe_use_aux_free", default=True),
    )
    width = read.divided("moe_intermediate_size", read.size("moe_intermediate_size"))
    return MoESpec(routing, read.size("hidden_size"), width, dtype)


def _moe_layers(read: ConfigReader) -> set[int]:
    """Numbers of the blocks with experts."""
    layers = read.size("num_hidden_layers")
    first = read.count("moe_layer_start_index", default=1)
    interval = read.size("moe_layer_interval", default=1)
    last = read.config.get("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else read.count("moe_layer_end_index")
    return {n for n in range(first, min(last, layers - 1) + 1) if (n + 1) % interval == 0}


class Ernie4_5_MoeForCausalLM(DecoderLM):
    """Grouped-query attention with interleaved rotation; experts with shared ones, or a dense
    block."""

    @staticmethod
    def shapes(config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        read = ConfigReader(config, tp_size)
        read.require_silu()
        read.rotary(read.head_dim(), theta=ROPE_THETA, interleaved=True)
        read.divided("intermediate_size", read.size("intermediate_size"))
        return read.shapes(read.gqa(dtype, interleaved=True), _moe(read, dtype))

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        heads, spec = read.heads(), read.gqa(build.dtype, interleaved=True)
        rotary = read.rotary(read.head_dim(), theta=ROPE_THETA, interleaved=True)
        moe, width = _moe(read, build.dtype), read.size("moe_intermediate_size")
        shared = width * read.count("moe_num_shared_experts", default=0)
        intermediate, moe_layers = read.size("intermediate_size"), _moe_layers(read)
        bias = read.flag("use_bias", default=False)
        build.weights.rename("ernie.", "model.")  # Paddle checkpoints
        build.weights.rename("mlp.gate.moe_statics.", "mlp.moe_statics.")  # unconverted names
        build.weights.keep("model.mtp_")

        def feed_forward(build: ModelBuilder, prefix: str, number: int) -> FeedForward:
            if number not in moe_layers:
                return build.mlp(prefix, heads.hidden, intermediate, bias=bias)
            has_bias = moe.routing.has_correction_bias
            return build.moe_block(
                prefix,
                moe,
                width,
                shared_intermediate=shared,
                shared_bias=bias,
                bias_name=f"{prefix}.moe_statics.e_score_correction_bias" if has_bias else "",
                bias_shape=(1, moe.routing.num_experts),
            )

        super().__init__(
            read,
            build,
            attention=lambda build, prefix: build.gqa(
                prefix, heads, spec, rotary, qkv_bias=bias, output_bias=bias
            ),
            feed_forward=feed_forward,
            tied=True,
            head_bias=bias,
        )
