"""Gemma 3, text (transformers: Gemma3ForCausalLM; arXiv 2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.model import ModelShapes
from fastdeploy_core.errors import UnsupportedModel
from fastdeploy_core.layers import RotarySpec
from fastdeploy_core.models.reading import ConfigReader

from .gemma2 import Gemma2ForCausalLM

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Five blocks with a window, then one without, which turns by a base of its own; query and key
    heads are normed."""

    head_norms = True
    rope_theta = 1_000_000.0
    default_caps = (0.0, 0.0)
    reads = Gemma2ForCausalLM.reads | {
        *("rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"),
    }

    @classmethod
    def has_window(cls, read: ConfigReader, number: int) -> bool:
        """All but every sixth block."""
        return bool((number + 1) % read.size("sliding_window_pattern", default=6))

    @classmethod
    def layer(
        cls, read: ConfigReader, number: int, spec: AttentionSpec, rotary: RotarySpec
    ) -> tuple[AttentionSpec, RotarySpec]:
        """Blocks with a window turn by the local base, without scaling."""
        spec, rotary = super().layer(read, number, spec, rotary)
        if not spec.window:
            return spec, rotary
        theta = read.number("rope_local_base_freq", default=10_000.0)
        return spec, replace(rotary, theta=theta, kind="default", parameters={})

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        return super().shapes(_with_one_rope(config), tp_size, dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        super().__init__(_with_one_rope(config), build)


def _with_one_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json as older releases of transformers wrote it: a rule for blocks without a window,
    and a base for the others."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or not isinstance(rope.get("full_attention"), Mapping):
        return config
    local = rope.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise UnsupportedModel(
            f"config.json of this Gemma 3 has rope scaling {local['rope_type']!r} for blocks with "
            "a window, which is not supported; possible: default"
        )
    theta = local.get("rope_theta", 10_000.0)
    own = {"rope_parameters": rope["full_attention"], "rope_local_base_freq": theta}
    return {**config, **own}
