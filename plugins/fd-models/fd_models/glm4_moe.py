"""GLM-4.5, 4.6 and 4.7 (transformers: Glm4MoeForCausalLM), and how their blocks with experts are
put together, which other families have, too.

Weights of multi-token-prediction blocks, numbered after the last block, are kept in `mtp_weights`
for a drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.models.reading import ConfigReader

from .fields import StrictLM

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import FeedForward, MakeFeedForward


class SigmoidRoutedLM(StrictLM):
    """Sigmoid routing with a correction bias beside shared experts; dense blocks are the first
    ones, or those that mlp_layer_types names."""

    output_bias: ClassVar[str | bool] = False
    only = {"scoring_func": ("sigmoid", "noaux_tc")}  # noqa: RUF012 - two words for one
    bias_name: ClassVar[str] = "gate.e_score_correction_bias"  # below the block's prefix
    reads = frozenset(
        {
            *("n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts"),
            *("num_shared_experts", "routed_scaling_factor", "router_scaling_factor"),
        }
    )

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        layers = read.size("num_hidden_layers")
        for number in range(read.count("num_nextn_predict_layers", "num_mtp_layers", default=0)):
            build.weights.keep(f"model.layers.{layers + number}.")
        super().__init__(config, build)

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts."""
        routing = RoutingSpec(
            num_experts=read.size("n_routed_experts", "num_experts", "num_local_experts"),
            top_k=read.size("num_experts_per_tok"),
            scoring="sigmoid",
            renormalize=read.flag("norm_topk_prob", default=True),
            scaling_factor=read.number(
                "routed_scaling_factor", "router_scaling_factor", default=1.0
            ),
            num_groups=read.size("n_group", default=1),
            top_k_groups=read.size("topk_group", default=1),
            has_correction_bias=True,
        )
        return read.experts(routing, dtype)

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts with shared ones, or a dense block."""
        moe, width = self.moe(read, dtype), read.size("moe_intermediate_size")
        dense = super().make_feed_forward(read, dtype)
        shared = width * read.count("n_shared_experts", "num_shared_experts", default=1)

        def make(build: ModelBuilder, prefix: str, number: int) -> FeedForward:
            if is_dense(read, number):
                return dense(build, prefix, number)
            return build.moe_block(
                prefix,
                moe,
                width,
                shared_intermediate=shared,
                bias_name=f"{prefix}.{self.bias_name}",
            )

        return make


def is_dense(read: ConfigReader, number: int) -> bool:
    """Whether a block has no experts, by mlp_layer_types or first_k_dense_replace. Blocks behind
    the last one, which drafters have, have them."""
    kinds = read.config.get("mlp_layer_types")
    if kinds is None or number >= read.size("num_hidden_layers"):
        return number < read.count("first_k_dense_replace", default=1)
    words = ("dense", "sparse")
    if not isinstance(kinds, list) or number >= len(kinds) or kinds[number] not in words:
        raise ConfigError(
            f"config.json of this {read.architecture} has mlp_layer_types={kinds!r}; expected "
            f"{' or '.join(words)} for each layer"
        )
    return bool(kinds[number] == "dense")


class Glm4MoeForCausalLM(SigmoidRoutedLM):
    """Half of each head turns; the large model normalises query and key heads."""

    norm_eps = 1e-5
    head_norms = "use_qk_norm"
    partial_rotary = 0.5
    reads = SigmoidRoutedLM.reads | {"partial_rotary_factor", "use_qk_norm"}
