"""Command R, R7B and A (transformers: CohereForCausalLM, Cohere2ForCausalLM)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fastdeploy_core.layers import ForwardContext, LayerNorm, RotarySpec
from fastdeploy_core.models.reading import ConfigReader
from fd_models.fields import StrictLM

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import AttentionLayer, Block, FeedForward
    from fastdeploy_core.tensor import Tensor


class PlainLayerNorm(LayerNorm):
    """LayerNorm without a bias, called as RMSNorm is."""

    def __init__(self, build: ModelBuilder, name: str, size: int, eps: float) -> None:
        super().__init__(build, name, size, eps, bias=False)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        total = x if residual is None else x + residual
        return self(total), total


@dataclass(slots=True)
class ParallelLayer:
    """One block: x + attention(norm(x)) + feed_forward(norm(x)), with one norm."""

    norm: Callable[[Tensor], Tensor]
    attention: AttentionLayer
    feed_forward: FeedForward
    select_rows: Callable[[Tensor, Tensor], Tensor]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As DecoderLayer; the sums are made here, because both branches begin at one."""
        x = x if residual is None else x + residual
        normed = self.norm(x)
        attended = self.attention(normed, positions, context)
        if rows is not None:
            attended, normed, x = (self.select_rows(each, rows) for each in (attended, normed, x))
        return x + attended, self.feed_forward(normed)


class CohereForCausalLM(StrictLM):
    """LayerNorm, one a block; logits are scaled."""

    norm_eps = 1e-5
    last_norm: ClassVar[Callable[..., Any]] = PlainLayerNorm
    interleaved = True
    tied = True
    rope_theta = 500_000.0
    # Released folders name much that the published model computes in one way only.
    only = {  # noqa: RUF012 - never changed
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "use_parallel_embedding": (True,),
        "use_qk_norm": (False,),
    }
    reads = frozenset({"layer_norm_eps", "logit_scale"})

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        self._scale = ConfigReader(config).number("logit_scale", default=0.0625)
        super().__init__(config, build)

    def block(self, build: ModelBuilder, prefix: str, number: int) -> Block:
        """One block with that checkpoint prefix."""
        return ParallelLayer(
            norm=self.last_norm(build, f"{prefix}.input_layernorm", self._hidden, self._eps),
            attention=self._attention(build, f"{prefix}.self_attn", number),
            feed_forward=self._feed_forward(build, f"{prefix}.mlp", number),
            select_rows=build.kernels["select_rows"],
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Times a constant above 0; the likeliest token is the same."""
        return super().compute_logits(hidden) * self._scale


class Cohere2ForCausalLM(CohereForCausalLM):
    """Blocks with a window turn; every fourth sees all and does not."""

    rope_theta = 10_000.0
    defaults = {"sliding_window": 4096}  # noqa: RUF012 - never changed
    sliding_window_pattern = 4
    reads = CohereForCausalLM.reads | {"sliding_window_pattern"}

    @classmethod
    def layer(
        cls, read: ConfigReader, number: int, spec: AttentionSpec, rotary: RotarySpec
    ) -> tuple[AttentionSpec, RotarySpec]:
        """With the block's window."""
        spec, rotary = super().layer(read, number, spec, rotary)
        return spec, rotary if spec.window else RotarySpec(rotary.dim, 1.0, kind="none")
