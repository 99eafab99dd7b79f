"""SmolLM3 (transformers: SmolLM3ForCausalLM)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.layers import RotarySpec

from .fields import StrictLM, has_positions

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.models.reading import ConfigReader


class SmolLM3ForCausalLM(StrictLM):
    """Llama with blocks that do not turn; these alone may have a window."""

    tied = True
    rope_theta = 2_000_000.0
    mlp_bias = "mlp_bias"
    uses_window = False
    reads = frozenset(
        {
            *("max_window_layers", "mlp_bias", "no_rope_layer_interval", "no_rope_layers"),
            "use_sliding_window",
        }
    )

    @classmethod
    def has_window(cls, read: ConfigReader, number: int) -> bool:
        """Blocks that do not turn."""
        return not has_positions(read, number)

    @classmethod
    def layer(
        cls, read: ConfigReader, number: int, spec: AttentionSpec, rotary: RotarySpec
    ) -> tuple[AttentionSpec, RotarySpec]:
        """With the block's window; every fourth does not turn, or those that config.json names."""
        spec, rotary = super().layer(read, number, spec, rotary)
        turns = has_positions(read, number)
        return spec, rotary if turns else RotarySpec(rotary.dim, 1.0, kind="none")
