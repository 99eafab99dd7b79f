"""Qwen2 and Qwen2.5 (transformers: Qwen2ForCausalLM): biases on q, k and v only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.model import ModelShapes

from .decoder import DecoderLM
from .reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.layers.builder import ModelBuilder


class Qwen2ForCausalLM(DecoderLM):
    """Grouped-query attention with q, k and v biases, and a gated feed-forward block."""

    @staticmethod
    def shapes(config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        read = ConfigReader(config, tp_size)
        read.require_silu()
        read.refuse_sliding_window()
        read.rotary(read.head_dim())
        read.divided("intermediate_size", read.size("intermediate_size"))
        return read.shapes(read.gqa(dtype))

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        heads, spec, rotary = read.heads(), read.gqa(build.dtype), read.rotary(read.head_dim())
        intermediate = read.size("intermediate_size")
        super().__init__(
            read,
            build,
            attention=lambda build, prefix: build.gqa(prefix, heads, spec, rotary, qkv_bias=True),
            feed_forward=lambda build, prefix, _: build.mlp(prefix, heads.hidden, intermediate),
        )
