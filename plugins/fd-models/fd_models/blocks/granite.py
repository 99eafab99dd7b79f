"""Granite 3 (transformers: GraniteForCausalLM, GraniteMoeForCausalLM): constants multiply
embeddings, branches, attention and logits. Granite 4 has them, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.layers import ForwardContext, RMSNorm
from fastdeploy_core.models.reading import ConfigReader
from fd_models.fields import StrictLM
from fd_models.gemma2 import ScaledEmbedding

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import AttentionLayer, Block, FeedForward, MakeFeedForward
    from fastdeploy_core.tensor import Tensor

# Names of the checkpoint, and those of other families for the same parts.
EXPERTS = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.router.layer": "mlp.gate",
}

MULTIPLIERS = frozenset(
    {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}
)


@dataclass(slots=True)
class ScaledLayer:
    """One block whose branches are multiplied by a constant before they are added."""

    input_norm: RMSNorm
    mixer: AttentionLayer
    post_norm: RMSNorm
    feed_forward: FeedForward
    scale: float
    select_rows: Callable[[Tensor, Tensor], Tensor]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As DecoderLayer; the sums are made here, because a factor stands before them."""
        x = x if residual is None else x + residual
        mixed = self.mixer(self.input_norm(x), positions, context)
        if rows is not None:
            mixed, x = self.select_rows(mixed, rows), self.select_rows(x, rows)
        x = x + mixed * self.scale
        return x + self.feed_forward(self.post_norm(x)) * self.scale, None


class GraniteForCausalLM(StrictLM):
    """Llama with four constants."""

    mlp_bias = "mlp_bias"
    reads = MULTIPLIERS | {"mlp_bias"}

    @classmethod
    def attention(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """With a scale of its own."""
        scale = read.number("attention_multiplier", default=1.0)
        return replace(super().attention(read, dtype), scale=scale)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        self._scale = read.number("residual_multiplier", default=1.0)
        self._logits_scale = read.number("logits_scaling", default=1.0)
        super().__init__(config, build)
        factor = read.number("embedding_multiplier", default=1.0)
        self.embedding: Any = ScaledEmbedding(build, self.embedding, factor)

    def block(self, build: ModelBuilder, prefix: str, number: int) -> Block:
        """One block with that checkpoint prefix."""
        size, eps = self._hidden, self._eps
        return ScaledLayer(
            input_norm=build.norm(f"{prefix}.input_layernorm", size, eps),
            mixer=self._attention(build, f"{prefix}.self_attn", number),
            post_norm=build.norm(f"{prefix}.post_attention_layernorm", size, eps),
            feed_forward=self._feed_forward(build, f"{prefix}.mlp", number),
            scale=self._scale,
            select_rows=build.kernels["select_rows"],
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Divided by a constant; the likeliest token is the same."""
        return super().compute_logits(hidden) / self._logits_scale


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Experts in every block; the weights of the chosen ones are made to sum to 1."""

    reads = MULTIPLIERS

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

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        for old, new in EXPERTS.items():
            build.weights.rename(old, new)
        super().__init__(config, build)

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts."""
        moe, width = self.moe(read, dtype), read.size("intermediate_size")
        return lambda build, prefix, _: build.moe_block(prefix, moe, width)
