"""MiniMax M2 (transformers: MiniMaxM2ForCausalLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.errors import UnsupportedModel
from fastdeploy_core.layers import RotarySpec
from fastdeploy_core.models.reading import ConfigReader

from .fields import StrictLM
from .mixtral import mixtral_names

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import MakeFeedForward


class MiniMaxM2ForCausalLM(StrictLM):
    """Experts in every block, sigmoid routing with a correction bias; queries and keys are
    normalised over all heads at once, and a part of each head turns."""

    qkv_bias = output_bias = False
    whole_norms = True
    partial_rotary = 1.0
    rope_theta = 5000000.0
    # Released folders name much that the published model computes in one way only.
    only = {  # noqa: RUF012 - never changed
        "attention_bias": (False,),
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    }
    reads = frozenset(
        {
            *("attn_type_list", "partial_rotary_factor", "rotary_dim"),
            # Of layers that this model has not: no shared experts, no windows.
            *("shared_moe_mode", "swa_rope_theta"),
        }
    )

    @classmethod
    def check(cls, read: ConfigReader) -> None:
        """UnsupportedModel for a field, or a kind of layer, that is not computed."""
        super().check(read)
        kinds = read.config.get("attn_type_list") or []
        if any(kind != 1 for kind in kinds):
            raise UnsupportedModel(
                f"attn_type_list of this {read.architecture} has layers other than full attention, "
                "which are not supported; possible: 1 in every place"
            )

    @classmethod
    def rotary(cls, read: ConfigReader) -> RotarySpec:
        """Released folders say `rotary_dim`, transformers a share of the head."""
        dim = read.size("rotary_dim", default=read.rotary_dim(default=1.0))
        return read.rotary(dim, theta=cls.rope_theta)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        mixtral_names(build)
        super().__init__(config, build)

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts."""
        routing = RoutingSpec(
            num_experts=read.size("num_local_experts"),
            top_k=read.size("num_experts_per_tok"),
            scoring="sigmoid",
            renormalize=True,
            has_correction_bias=True,
        )
        return read.experts(routing, dtype, width_key="intermediate_size")

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts."""
        moe, width = self.moe(read, dtype), read.size("intermediate_size")
        return lambda build, prefix, _: build.moe_block(
            prefix, moe, width, bias_name=f"{prefix}.e_score_correction_bias"
        )
