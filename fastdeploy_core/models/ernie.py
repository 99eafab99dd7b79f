"""ERNIE 4.5, dense and mixture of experts (transformers: Ernie4_5ForCausalLM and
Ernie4_5_MoeForCausalLM; Paddle: Ernie4_5_ForCausalLM).

Multi-token-prediction weights (model.mtp_*) are kept in `mtp_weights` for a drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.errors import UnsupportedModel

from .decoder import GroupedQueryLM
from .reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.layers.builder import ModelBuilder

    from .decoder import FeedForward, MakeFeedForward


class Ernie4_5ForCausalLM(GroupedQueryLM):
    """Interleaved rotation; one key says whether layers have biases."""

    norm_eps = 1e-5
    rope_theta = 500000.0
    interleaved = True
    qkv_bias = output_bias = mlp_bias = "use_bias"
    tied = True

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        build.weights.rename("ernie.", "model.")  # Paddle checkpoints
        super().__init__(config, build)


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    """Softmax routing with a correction bias that changes the choice of experts but not their
    weights; shared experts in addition to the routed ones; dense blocks outside
    moe_layer_start_index..moe_layer_end_index."""

    head_bias: ClassVar[str | bool] = "use_bias"

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        build.weights.rename("mlp.gate.moe_statics.", "mlp.moe_statics.")  # unconverted names
        build.weights.keep("model.mtp_")
        super().__init__(config, build)

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts."""
        if (least := read.number("moe_norm_min", default=0)) > 1e-6:  # of the chosen weights' sum
            raise UnsupportedModel(f"moe_norm_min {least} is not supported; possible: up to 1e-6")
        routing = RoutingSpec(
            num_experts=read.size("moe_num_experts", "num_experts"),
            top_k=read.size("moe_k", "num_experts_per_tok"),
            scoring="softmax",
            renormalize=True,
            has_correction_bias=read.flag("moe_use_aux_free", default=True),
        )
        return read.experts(routing, dtype)

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts with shared ones, or a dense block."""
        moe, width = self.moe(read, dtype), read.size("moe_intermediate_size")
        dense, moe_layers = super().make_feed_forward(read, dtype), _moe_layers(read)
        shared = width * read.count("moe_num_shared_experts", default=0)
        shared_bias = read.flag("use_bias", default=False)
        has_bias = moe.routing.has_correction_bias

        def make(build: ModelBuilder, prefix: str, number: int) -> FeedForward:
            if number not in moe_layers:
                return dense(build, prefix, number)
            return build.moe_block(
                prefix,
                moe,
                width,
                shared_intermediate=shared,
                shared_bias=shared_bias,
                bias_name=f"{prefix}.moe_statics.e_score_correction_bias" if has_bias else "",
                bias_shape=(1, moe.routing.num_experts),
            )

        return make


def _moe_layers(read: ConfigReader) -> set[int]:
    """Numbers of the blocks with experts."""
    layers = read.size("num_hidden_layers")
    first = read.count("moe_layer_start_index", default=1)
    interval = read.size("moe_layer_interval", default=1)
    last = read.config.get("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else read.count("moe_layer_end_index")
    return {n for n in range(first, min(last, layers - 1) + 1) if (n + 1) % interval == 0}
