"""EXAONE 4 and K-EXAONE (transformers: Exaone4ForCausalLM, ExaoneMoeForCausalLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fastdeploy_core.layers import RotarySpec
from fd_models.fields import StrictLM
from fd_models.glm4_moe import SigmoidRoutedLM
from fd_models.olmo2 import Olmo2ForCausalLM

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.reading import ConfigReader


class ExaoneLM(StrictLM):
    """Norms over each query and key head. Where there are windows, blocks without one do not
    turn."""

    head_norms = True
    qkv_bias = False
    output_bias: ClassVar[str | bool] = False
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


class Exaone4ForCausalLM(ExaoneLM, Olmo2ForCausalLM):
    """Norms behind attention and feed-forward block."""

    whole_norms = False


class ExaoneMoeForCausalLM(ExaoneLM, SigmoidRoutedLM):
    """Norms before both, and experts behind a dense block."""

    norm_eps = 1e-5
    bias_name = "e_score_correction_bias"
    only = {**ExaoneLM.only, **SigmoidRoutedLM.only}  # noqa: RUF012 - never changed
    defaults = {  # noqa: RUF012 - never changed
        "routed_scaling_factor": 2.5,
        "sliding_window": 4096,
    }
    reads = ExaoneLM.reads | SigmoidRoutedLM.reads

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        build.weights.keep("mtp.")
        super().__init__(config, build)
