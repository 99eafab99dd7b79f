"""OLMoE (transformers: OlmoeForCausalLM; arXiv 2409.02060)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.models.reading import ConfigReader
from fd_models.fields import StrictLM

if TYPE_CHECKING:
    from fastdeploy_core.models.decoder import MakeFeedForward


class OlmoeForCausalLM(StrictLM):
    """Experts in every block; queries and keys are normalised over all heads at once."""

    norm_eps = 1e-5
    whole_norms = True
    reads = frozenset({"norm_topk_prob", "num_experts"})

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts."""
        routing = RoutingSpec(
            num_experts=read.size("num_experts", default=64),
            top_k=read.size("num_experts_per_tok", default=8),
            scoring="softmax",
            renormalize=read.flag("norm_topk_prob", default=False),
        )
        return read.experts(routing, dtype, width_key="intermediate_size")

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts."""
        moe, width = self.moe(read, dtype), read.size("intermediate_size")
        return lambda build, prefix, _: build.moe_block(prefix, moe, width)
