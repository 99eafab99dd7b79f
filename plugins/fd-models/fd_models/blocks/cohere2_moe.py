"""Command A+ (transformers: Cohere2MoeForCausalLM): Command A with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.layers import RMSNorm
from fastdeploy_core.models.reading import ConfigReader
from fd_models.glm4_moe import is_dense

from .cohere2 import Cohere2ForCausalLM, PlainLayerNorm

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.layers import ModelBuilder, RotarySpec
    from fastdeploy_core.models.decoder import FeedForward, MakeFeedForward
    from fastdeploy_core.tensor import Tensor


@dataclass(slots=True)
class Halved:
    """The mean of routed and shared experts, from a block that adds them."""

    block: FeedForward

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden], model dtype; so is the result."""
        return self.block(x) * 0.5


class Cohere2MoeForCausalLM(Cohere2ForCausalLM):
    """Experts beside shared ones; the first blocks may be dense, with a width, and a pattern of
    windows, of their own."""

    defaults = {  # noqa: RUF012 - never changed
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "sliding_window": 4096,
    }
    only = {  # noqa: RUF012 - never changed
        **Cohere2ForCausalLM.only,
        "expert_selection_fn": ("softmax", "sigmoid"),
        "shared_expert_combination_strategy": ("average", "sum"),
    }
    reads = Cohere2ForCausalLM.reads | {
        *("norm_topk_prob", "num_experts", "num_shared_experts"),
        "prefix_dense_sliding_window_pattern",
    }

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        self._is_rms = config.get("rms_norm_eps") is not None
        super().__init__(config, build)

    def last_norm(self, build: ModelBuilder, name: str, size: int, eps: float) -> Any:
        """LayerNorm, or by the root mean square where config.json names its epsilon."""
        return (RMSNorm if self._is_rms else PlainLayerNorm)(build, name, size, eps)

    @classmethod
    def has_window(cls, read: ConfigReader, number: int) -> bool:
        """Each of the two kinds of blocks is counted for itself."""
        first = read.count("first_k_dense_replace", default=0)
        if number >= first:
            return super().has_window(read, number - first)
        return (number + 1) % read.size("prefix_dense_sliding_window_pattern", default=1) != 0

    @classmethod
    def layer(
        cls, read: ConfigReader, number: int, spec: AttentionSpec, rotary: RotarySpec
    ) -> tuple[AttentionSpec, RotarySpec]:
        """Dense blocks without windows turn if none of them has one."""
        seen, turning = super().layer(read, number, spec, rotary)
        pattern = read.size("prefix_dense_sliding_window_pattern", default=1)
        return seen, rotary if is_dense(read, number) and pattern == 1 else turning

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts. A softmax over the chosen ones is one over all, made to sum to 1."""
        is_sigmoid = read.config.get("expert_selection_fn") == "sigmoid"
        routing = RoutingSpec(
            num_experts=read.size("num_experts", default=8),
            top_k=read.size("num_experts_per_tok", default=2),
            scoring="sigmoid" if is_sigmoid else "softmax",
            renormalize=not is_sigmoid or read.flag("norm_topk_prob", default=True),
        )
        return read.experts(routing, dtype, width_key="intermediate_size")

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts with shared ones, or a dense block."""
        moe, width = self.moe(read, dtype), read.size("intermediate_size")
        dense = read.size("prefix_dense_intermediate_size", default=width)
        count = read.count("num_shared_experts", default=0)
        strategy = read.config.get("shared_expert_combination_strategy") or "average"

        def make(build: ModelBuilder, prefix: str, number: int) -> FeedForward:
            if is_dense(read, number):
                return build.mlp(prefix, moe.hidden_size, dense)
            block = build.moe_block(prefix, moe, width, shared_intermediate=count * width)
            is_mean = count and strategy == "average"
            return cast("FeedForward", Halved(block)) if is_mean else block

        return make
