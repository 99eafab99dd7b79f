"""ERNIE 4.5 dense models (transformers: Ernie4_5ForCausalLM; Paddle: Ernie4_5_ForCausalLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fastdeploy_core.contracts.model import ModelShapes

from .decoder import DecoderLM
from .reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.layers.builder import ModelBuilder

ROPE_THETA: Final = 500000.0


class Ernie4_5ForCausalLM(DecoderLM):
    """Grouped-query attention with interleaved rotation, and a gated feed-forward block."""

    @staticmethod
    def shapes(config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        read = ConfigReader(config, tp_size)
        read.require_silu()
        read.rotary(read.head_dim(), theta=ROPE_THETA, interleaved=True)
        read.divided("intermediate_size", read.size("intermediate_size"))
        return read.shapes(read.gqa(dtype, interleaved=True))

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        heads, spec = read.heads(), read.gqa(build.dtype, interleaved=True)
        rotary = read.rotary(read.head_dim(), theta=ROPE_THETA, interleaved=True)
        intermediate = read.size("intermediate_size")
        bias = read.flag("use_bias", default=False)
        build.weights.rename("ernie.", "model.")  # Paddle checkpoints
        super().__init__(
            read,
            build,
            attention=lambda build, prefix: build.gqa(
                prefix, heads, spec, rotary, qkv_bias=bias, output_bias=bias
            ),
            feed_forward=lambda build, prefix, _: build.mlp(
                prefix, heads.hidden, intermediate, bias=bias
            ),
            tied=True,
        )
