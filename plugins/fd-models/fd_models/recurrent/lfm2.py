"""LFM2 (transformers: Lfm2ForCausalLM, Lfm2MoeForCausalLM): gated short convolutions, and attention
in some blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.model import ModelShapes, StateSpec
from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.layers import ForwardContext, Linear, LinearPart, LinearShape
from fastdeploy_core.models.reading import ConfigReader

from .layers import HybridLM, RecurrentLayer

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder, RotarySpec
    from fastdeploy_core.models.decoder import AttentionLayer, FeedForward, MakeFeedForward
    from fastdeploy_core.tensor import Tensor

# Names of the checkpoint, and those of other families for the same parts.
_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "model.embedding_norm": "model.norm",
}


class ShortConvolution(RecurrentLayer):
    """out(C * conv(B * x)) with B, C and x out of one product."""

    def __init__(
        self, build: ModelBuilder, prefix: str, hidden: int, spec: StateSpec, bias: bool
    ) -> None:
        super().__init__(build, prefix, spec, f"{prefix}.conv", conv_bias=bias)
        # The checkpoint has these three joined under the layer's name.
        parts = [LinearPart(f"{prefix}.in_proj_{part}", hidden, build.piece) for part in "bcx"]
        column = LinearShape(f"{prefix}.in_proj", parts, hidden, parallel="column", bias=bias)
        self._product = Linear(build, column)
        self._output = build.linear(f"{prefix}.out_proj", hidden, hidden, bias=bias, parallel="row")

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], normed; so wide is the result."""
        b, c, x = self._xp.split(self._product(x), sum(self.spec.conv_parts), -1)
        return self._output(c * self.recur(b * x, None, None, context))


class Lfm2ForCausalLM(HybridLM):
    """Short convolutions in place of attention in most blocks; query and key heads are normed."""

    head_norms = True
    tied = True
    qkv_bias = output_bias = False
    rope_theta = 1_000_000.0
    recurrent = other_layers = frozenset({"conv"})
    recurrent_name = "conv"
    adjusts_width: ClassVar[bool] = True  # where config.json does not say; False: never
    reads = frozenset(
        {
            *("block_auto_adjust_ff_dim", "block_dim", "block_ff_dim", "block_ffn_dim_multiplier"),
            *(
                "block_mlp_init_scale",
                "block_multiple_of",
                "block_norm_eps",
                "block_out_init_scale",
            ),
            *("block_use_swiglu", "block_use_xavier_init", "conv_L_cache", "conv_bias", "conv_dim"),
            *("conv_dim_out", "conv_use_xavier_init", "full_attn_idxs", "norm_eps", "num_heads"),
            *("use_pos_enc",),
        }
    )

    @classmethod
    def is_recurrent(cls, read: ConfigReader, number: int) -> bool:
        """All blocks but full_attn_idxs, if layer_types does not say."""
        if read.config.get("layer_types"):
            return super().is_recurrent(read, number)
        return number not in (read.config.get("full_attn_idxs") or ())

    @classmethod
    def state(cls, read: ConfigReader, dtype: str) -> StateSpec:
        """One rank's convolutions; there is no state but their inputs."""
        channels = read.divided("hidden_size", read.size("hidden_size"))
        width = read.size("conv_L_cache", default=3)
        return StateSpec("short_conv", 0, 0, 0, 0, (channels,), width, dtype)

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        return super().shapes(_usual(config, cls.adjusts_width), tp_size, dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        for old, new in _NAMES.items():
            build.weights.rename(old, new)
        super().__init__(_usual(config, self.adjusts_width), build)

    def attend(
        self,
        read: ConfigReader,
        build: ModelBuilder,
        prefix: str,
        spec: AttentionSpec,
        rotary: RotarySpec,
    ) -> AttentionLayer:
        """Attention with norms of heads."""
        eps = read.number("rms_norm_eps", default=1e-5)
        return build.gqa(prefix, read.heads(), spec, rotary, norm_eps=eps)

    def recur(
        self, read: ConfigReader, build: ModelBuilder, prefix: str, spec: StateSpec
    ) -> AttentionLayer:
        """A short convolution."""
        bias = read.flag("conv_bias", default=False)
        return ShortConvolution(build, prefix, read.size("hidden_size"), spec, bias)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """Sigmoid routing with a correction bias behind the first dense blocks."""

    adjusts_width = False
    reads = Lfm2ForCausalLM.reads | {
        *("norm_topk_prob", "num_experts", "routed_scaling_factor", "use_expert_bias"),
    }

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        build.weights.rename("feed_forward.", "mlp.")
        for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            build.weights.rename(f".{old}.", f".{new}.")
        super().__init__(config, build)

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts."""
        routing = RoutingSpec(
            num_experts=read.size("num_experts", default=32),
            top_k=read.size("num_experts_per_tok", default=4),
            scoring="sigmoid",
            renormalize=read.flag("norm_topk_prob", default=True),
            scaling_factor=read.number("routed_scaling_factor", default=1.0),
            has_correction_bias=read.flag("use_expert_bias", default=True),
        )
        return read.experts(routing, dtype)

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts, or a dense block."""
        moe, width = self.moe(read, dtype), read.size("moe_intermediate_size")
        dense, first = (
            super().make_feed_forward(read, dtype),
            read.count("num_dense_layers", default=2),
        )

        def make(build: ModelBuilder, prefix: str, number: int) -> FeedForward:
            if number < first:
                return dense(build, prefix, number)
            bias = f"{prefix}.expert_bias" if moe.routing.has_correction_bias else ""
            return build.moe_block(prefix, moe, width, bias_name=bias)

        return make


def _usual(config: Mapping[str, Any], adjusts_width: bool) -> Mapping[str, Any]:
    """config.json in the words of other families, with the width that its rules give."""
    read = ConfigReader(config)
    width = read.size("intermediate_size", "block_ff_dim")
    if adjusts_width and read.flag("block_auto_adjust_ff_dim", default=True):
        width = int(2 * width / 3)
        if config.get("block_ffn_dim_multiplier", 1.0) is not None:
            width = int(read.number("block_ffn_dim_multiplier", default=1.0) * width)
            multiple = read.size("block_multiple_of", default=256)
            width = multiple * -(-width // multiple)
    eps = read.number("norm_eps", default=1e-5)
    return {**config, "intermediate_size": width, "rms_norm_eps": eps}
