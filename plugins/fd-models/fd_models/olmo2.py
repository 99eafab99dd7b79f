"""OLMo 2 and 3 (transformers: Olmo2ForCausalLM, Olmo3ForCausalLM; arXiv 2501.00656)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastdeploy_core.layers import ForwardContext, RMSNorm

from .fields import LOCAL_BASE, LocalRopeLM, StrictLM

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import AttentionLayer, Block, FeedForward
    from fastdeploy_core.tensor import Tensor


@dataclass(slots=True)
class PostNormLayer:
    """One block: x + norm(attention(x)), then x + norm(feed_forward(x))."""

    attention: AttentionLayer
    post_attention_norm: RMSNorm
    feed_forward: FeedForward
    post_feed_forward_norm: RMSNorm
    select_rows: Callable[[Tensor, Tensor], Tensor]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As DecoderLayer; the sums are made here, because the norms are not over them."""
        x = x if residual is None else x + residual
        attended = self.attention(x, positions, context)
        if rows is not None:
            attended, x = self.select_rows(attended, rows), self.select_rows(x, rows)
        x = x + self.post_attention_norm(attended)
        return x + self.post_feed_forward_norm(self.feed_forward(x)), None


class Olmo2ForCausalLM(StrictLM):
    """Norms after attention and feed-forward block instead of before them; queries and keys are
    normalised over all heads at once."""

    norm_eps = 1e-5
    whole_norms = True

    def block(self, build: ModelBuilder, prefix: str, number: int) -> Block:
        """One block with that checkpoint prefix."""
        size, eps = self._hidden, self._eps
        return PostNormLayer(
            attention=self._attention(build, f"{prefix}.self_attn", number),
            post_attention_norm=build.norm(f"{prefix}.post_attention_layernorm", size, eps),
            feed_forward=self._feed_forward(build, f"{prefix}.mlp", number),
            post_feed_forward_norm=build.norm(f"{prefix}.post_feedforward_layernorm", size, eps),
            select_rows=build.kernels["select_rows"],
        )


class Olmo3ForCausalLM(LocalRopeLM, Olmo2ForCausalLM):
    """OLMo 2 with a window in all but every fourth block; these alone turn by a scaled rule."""

    rope_theta = 500_000.0
    defaults = {"sliding_window": 4096}  # noqa: RUF012 - never changed
    sliding_window_pattern = 4
    reads = frozenset({LOCAL_BASE})
