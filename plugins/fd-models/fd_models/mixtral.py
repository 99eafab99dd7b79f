"""Mixtral (transformers: MixtralForCausalLM; arXiv 2401.04088): Mistral with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.models.reading import ConfigReader

from .mistral import MistralForCausalLM

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import MakeFeedForward


def mixtral_names(build: ModelBuilder) -> None:
    """Checkpoints call the block and the experts' matrices differently from all others."""
    for old, new in (
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    ):
        build.weights.rename(old, new)


class MixtralForCausalLM(MistralForCausalLM):
    """Softmax routing, in every block; the weights of the chosen experts are made to sum to 1."""

    norm_eps = 1e-5
    rope_theta = 1_000_000.0
    defaults = {}  # noqa: RUF012 - never changed

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        mixtral_names(build)
        super().__init__(config, build)

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts."""
        routing = RoutingSpec(
            num_experts=read.size("num_local_experts", default=8),
            top_k=read.size("num_experts_per_tok", default=2),
            scoring="softmax",
            renormalize=True,
        )
        return read.experts(routing, dtype, width_key="intermediate_size")

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts."""
        moe, width = self.moe(read, dtype), read.size("intermediate_size")
        return lambda build, prefix, _: build.moe_block(prefix, moe, width)
