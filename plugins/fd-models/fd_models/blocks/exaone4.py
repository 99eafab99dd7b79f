"""EXAONE 4 (transformers: Exaone4ForCausalLM)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.layers import RotarySpec
from fd_models.olmo2 import Olmo2ForCausalLM

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.models.reading import ConfigReader


class Exaone4ForCausalLM(Olmo2ForCausalLM):
    """Norms after attention and feed-forward block, and over each query and key head. Where there
    are windows, blocks without one do not turn."""

    whole_norms = False
    head_norms = True
    qkv_bias = output_bias = False
    only = {"attention_bias": (False,)}  # noqa: RUF012 - never changed
    defaults = {"sliding_window": 4096}  # noqa: RUF012 - never changed
    sliding_window_pattern = 4
    reads = frozenset({"sliding_window_pattern"})

    @classmethod
    def layer(
        cls, read: ConfigReader, number: int, spec: AttentionSpec, rotary: RotarySpec
    ) -> tuple[AttentionSpec, RotarySpec]:
        """With the block's window."""
        spec, rotary = super().layer(read, number, spec, rotary)
        turns = spec.window or not cls._window(read)
        return spec, rotary if turns else RotarySpec(rotary.dim, 1.0, kind="none")
