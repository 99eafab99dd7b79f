"""Qwen3 dense models (transformers: Qwen3ForCausalLM): every query and key head is normalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.model import ModelShapes

from .decoder import DecoderLM
from .reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.layers.builder import ModelBuilder


class Qwen3ForCausalLM(DecoderLM):
    """Grouped-query attention with query and key norms, and a gated feed-forward block."""

    @staticmethod
    def shapes(config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        read = ConfigReader(config, tp_size)
        read.require_silu()
        read.refuse_sliding_window()
        read.rotary(read.head_dim())
        read.divided("intermediate_size", read.size("intermediate_size"))
        return read.shapes(read.gqa(dtype, head_norms=True))

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        heads, spec, rotary = (
            read.heads(),
            read.gqa(build.dtype, head_norms=True),
            read.rotary(read.head_dim()),
        )
        intermediate = read.size("intermediate_size")
        bias = read.flag("attention_bias", default=False)
        eps = read.number("rms_norm_eps", default=1e-6)
        super().__init__(
            read,
            build,
            attention=lambda build, prefix: build.gqa(
                prefix, heads, spec, rotary, qkv_bias=bias, output_bias=bias, norm_eps=eps
            ),
            feed_forward=lambda build, prefix, _: build.mlp(prefix, heads.hidden, intermediate),
        )
