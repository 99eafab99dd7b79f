"""Qwen1.5-MoE and Qwen2-MoE (transformers: Qwen2MoeForCausalLM)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.models.reading import ConfigReader

from .fields import StrictLM
from .recurrent.gates import add_gated, cell

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import FeedForward, MakeFeedForward
    from fastdeploy_core.tensor import Tensor


class GatedSharedExpert:
    """sigmoid(gate(x)) * expert(x), one gate for each token."""

    def __init__(self, build: ModelBuilder, prefix: str, hidden: int, width: int) -> None:
        self._add_gated = cell(build, add_gated)
        # As the router: too small to round.
        self._gate = build.linear(f"{prefix}.shared_expert_gate", hidden, 1, quantize=False)
        self._expert = build.mlp(f"{prefix}.shared_expert", hidden, width, reduce=False)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden] to this rank's part of the sum over ranks, as wide."""
        gated: Tensor = self._add_gated(None, self._gate(x).unsqueeze(-1), self._expert(x))
        return gated

    def add_to(self, total: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """total + self(x), as SharedExperts wants it."""
        return self._add_gated(total, self._gate(x).unsqueeze(-1), self._expert(x)), None


class Qwen2MoeForCausalLM(StrictLM):
    """Biases on q, k and v; softmax routing beside one shared expert with a gate. Blocks listed in
    mlp_only_layers, or skipped by decoder_sparse_step, are dense."""

    output_bias = False
    qkv_bias = True
    uses_window = False
    only = {"attention_bias": (False,), "qkv_bias": (True,)}  # noqa: RUF012 - never changed
    reads = frozenset(
        {
            *("decoder_sparse_step", "max_window_layers", "mlp_only_layers", "norm_topk_prob"),
            *("num_experts", "shared_expert_intermediate_size", "use_sliding_window"),
        }
    )

    @classmethod
    def has_window(cls, read: ConfigReader, number: int) -> bool:
        """Every other block below max_window_layers."""
        return number % 2 == 0 and number < read.count("max_window_layers", default=28)

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts."""
        routing = RoutingSpec(
            num_experts=read.size("num_experts", "num_local_experts"),
            top_k=read.size("num_experts_per_tok"),
            scoring="softmax",
            renormalize=read.flag("norm_topk_prob", default=False),
        )
        shared = read.size("shared_expert_intermediate_size")
        read.divided("shared_expert_intermediate_size", shared)
        return read.experts(routing, dtype)

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts beside the shared one, or a dense block."""
        moe, width = self.moe(read, dtype), read.size("moe_intermediate_size")
        hidden, shared = moe.hidden_size, read.size("shared_expert_intermediate_size")
        dense = super().make_feed_forward(read, dtype)
        step = read.size("decoder_sparse_step", default=1)
        dense_layers = set(read.config.get("mlp_only_layers") or [])

        def make(build: ModelBuilder, prefix: str, number: int) -> FeedForward:
            if number in dense_layers or (number + 1) % step:
                return dense(build, prefix, number)
            gated = GatedSharedExpert(build, prefix, hidden, shared)
            return build.moe_block(prefix, moe, width, shared=gated)

        return make
