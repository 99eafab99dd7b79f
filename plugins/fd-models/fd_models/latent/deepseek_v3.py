"""DeepSeek V3 and R1 (transformers: DeepseekV3ForCausalLM; arXiv 2412.19437).

Latent attention, sigmoid routing in groups with a correction bias, shared experts; the first blocks
are dense. Weights of multi-token-prediction blocks, numbered after the last block, are kept in
`mtp_weights` for a drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.model import ModelShapes
from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.layers import RotarySpec, yarn_magnitude
from fastdeploy_core.models.decoder import DecoderLM
from fastdeploy_core.models.reading import ConfigReader

from .layers import LatentAttention, LatentShape

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import FeedForward


def latent_shape(read: ConfigReader) -> LatentShape:
    """Widths of the whole model."""
    has_q_lora = read.config.get("q_lora_rank") is not None
    return LatentShape(
        hidden=read.size("hidden_size"),
        num_heads=read.size("num_attention_heads"),
        qk_nope_head_dim=read.size("qk_nope_head_dim"),
        qk_rope_head_dim=read.size("qk_rope_head_dim"),
        v_head_dim=read.size("v_head_dim"),
        kv_lora_rank=read.size("kv_lora_rank"),
        q_lora_rank=read.size("q_lora_rank") if has_q_lora else None,
    )


def _rotary(read: ConfigReader) -> RotarySpec:
    interleaved = read.flag("rope_interleave", default=True)
    return read.rotary(read.size("qk_rope_head_dim"), interleaved=interleaved)


def _softmax_scale(spec: RotarySpec) -> float:
    """The factor YaRN puts on the attention scale when config.json gives mscale_all_dim."""
    if spec.kind == "default" or not spec.parameters.get("mscale_all_dim"):
        return 1.0
    return yarn_magnitude(spec.number("factor"), spec.number("mscale_all_dim")) ** 2


def latent_attention(read: ConfigReader, rotary: RotarySpec, dtype: str) -> AttentionSpec:
    """One rank's attention."""
    shape = latent_shape(read)
    q_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
    return AttentionSpec(
        kind="mla",
        num_heads=read.divided("num_attention_heads", shape.num_heads),
        num_kv_heads=1,
        head_dim=shape.kv_lora_rank + shape.qk_rope_head_dim,
        v_head_dim=shape.kv_lora_rank,
        scale=q_dim**-0.5 * _softmax_scale(rotary),
        dtype=dtype,
        kv_lora_rank=shape.kv_lora_rank,
        qk_rope_head_dim=shape.qk_rope_head_dim,
        rotary_interleaved=rotary.interleaved,
    )


def _moe(read: ConfigReader, dtype: str) -> MoESpec:
    routing = RoutingSpec(
        num_experts=read.size("n_routed_experts", "num_local_experts"),
        top_k=read.size("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=read.flag("norm_topk_prob", default=True),
        scaling_factor=read.number("routed_scaling_factor", default=1.0),
        num_groups=read.size("n_group", default=1),
        top_k_groups=read.size("topk_group", default=1),
        has_correction_bias=True,
    )
    return read.experts(routing, dtype)


class DeepseekV3ForCausalLM(DecoderLM):
    """Latent attention; experts with shared ones after the first dense blocks."""

    attention_layer: ClassVar[type[LatentAttention]] = LatentAttention
    # What transformers takes where config.json does not say.
    defaults: ClassVar[Mapping[str, Any]] = {
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    }

    @classmethod
    def attention_spec(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """One rank's attention."""
        return latent_attention(read, _rotary(read), dtype)

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        read = ConfigReader({**cls.defaults, **config}, tp_size)
        read.require_activation("silu", "swish")
        read.divided("intermediate_size", read.size("intermediate_size"))
        return read.shapes(cls.attention_spec(read, dtype), _moe(read, dtype))

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader({**self.defaults, **config}, build.tp_size)
        latent, rotary = latent_shape(read), _rotary(read)
        spec = self.attention_spec(read, build.dtype)
        moe, width = _moe(read, build.dtype), read.size("moe_intermediate_size")
        shared = width * read.count("n_shared_experts", default=0)
        intermediate = read.size("intermediate_size")
        first_moe = read.count("first_k_dense_replace", default=0)
        every = read.size("moe_layer_freq", default=1)
        bias = read.flag("attention_bias", default=False)
        kinds = read.config.get("mlp_layer_types")  # transformers' word for the two above
        layers = read.size("num_hidden_layers")
        for number in range(read.count("num_nextn_predict_layers", "num_mtp_layers", default=0)):
            build.weights.keep(f"model.layers.{layers + number}.")

        def feed_forward(build: ModelBuilder, prefix: str, number: int) -> FeedForward:
            is_dense = number < first_moe or number % every
            if kinds[number] == "dense" if kinds and number < layers else is_dense:
                return build.mlp(prefix, latent.hidden, intermediate)
            return build.moe_block(
                prefix,
                moe,
                width,
                shared_intermediate=shared,
                bias_name=f"{prefix}.gate.e_score_correction_bias",
            )

        super().__init__(
            read,
            build,
            attention=lambda build, prefix, _: self.attention_layer(
                build, prefix, latent, spec, rotary, bias=bias
            ),
            feed_forward=feed_forward,
        )
