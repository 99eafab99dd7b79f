"""dots.llm1, Solar Open and Hy3 (transformers: Dots1ForCausalLM, SolarOpenForCausalLM,
HYV3ForCausalLM): blocks with experts as GLM-4.5 has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fd_models.glm4_moe import SigmoidRoutedLM

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.reading import ConfigReader


class Dots1ForCausalLM(SigmoidRoutedLM):
    """Norms over each query and key head; the last blocks may have a window."""

    head_norms = True
    output_bias = "attention_bias"
    defaults = {  # noqa: RUF012 - never changed
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "sliding_window": 4096,
    }
    reads = SigmoidRoutedLM.reads | {"max_window_layers", "use_sliding_window"}

    @classmethod
    def has_window(cls, read: ConfigReader, number: int) -> bool:
        """From max_window_layers on."""
        return number >= read.count("max_window_layers", default=62)


class SolarOpenForCausalLM(SigmoidRoutedLM):
    """Experts in every block."""

    norm_eps = 1e-5
    rope_theta = 1_000_000.0
    defaults = {  # noqa: RUF012 - never changed
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "intermediate_size": 0,
    }


class HYV3ForCausalLM(SigmoidRoutedLM):
    """Norms over each query and key head."""

    norm_eps = 1e-5
    head_norms = True
    output_bias = "attention_bias"
    mlp_bias = "mlp_bias"
    rope_theta = 11_158_840.0
    bias_name = "expert_bias"
    defaults = {  # noqa: RUF012 - never changed
        "head_dim": 128,
        "router_scaling_factor": 2.826,
    }
    only = {  # noqa: RUF012 - never changed
        **SigmoidRoutedLM.only,
        "moe_router_enable_expert_bias": (True,),
        "moe_router_use_sigmoid": (True,),
        "qk_norm": (True,),
        "route_norm": (True,),
    }
    # What is added in float32 beside what is not, and another word for a width.
    reads = SigmoidRoutedLM.reads | {
        *("enable_attention_fp32_softmax", "enable_lm_head_fp32", "expert_hidden_dim", "mlp_bias")
    }

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        build.weights.rename(".mlp.router.gate.", ".mlp.gate.")
        build.weights.rename(".mlp.shared_mlp.", ".mlp.shared_experts.")
        super().__init__(config, build)
