"""Kimi Linear (transformers: KimiLinearForCausalLM; arXiv 2510.26692): delta nets whose states fade
channel by channel, beside latent attention without positions; experts as in GLM-4.5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.model import StateSpec
from fastdeploy_core.errors import ConfigError, UnsupportedModel
from fastdeploy_core.layers import ForwardContext, Linear, LinearPart, LinearShape, RotarySpec
from fastdeploy_core.models.reading import ConfigReader
from fd_models.glm4_moe import Glm4MoeForCausalLM
from fd_models.latent.deepseek_v3 import latent_attention, latent_shape
from fd_models.latent.layers import LatentAttention
from fd_models.mixtral import mixtral_names

from .layers import HybridLM, RecurrentLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.contracts.model import ModelShapes
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import AttentionLayer
    from fastdeploy_core.tensor import Tensor

# Words of this family's config.json, and those of families that mean the same.
_WORDS = {
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "model_max_length": "max_position_embeddings",
}
_LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


class KimiDelta(RecurrentLayer):
    """A delta net whose decay, and whose output's gate, come by way of few channels."""

    def __init__(
        self, build: ModelBuilder, prefix: str, read: ConfigReader, spec: StateSpec
    ) -> None:
        names = (f"{prefix}.{part}_conv1d" for part in "qkv")
        super().__init__(build, prefix, spec, *names)
        hidden, dim = read.size("hidden_size"), spec.value_dim
        width = spec.num_heads * dim * build.tp_size
        parts = [LinearPart(f"{prefix}.{part}_proj", width, build.piece) for part in "qkv"]
        column = LinearShape(f"{prefix}.qkv_proj", parts, hidden, parallel="column")
        self._qkv = Linear(build, column)
        heads = spec.num_heads * build.tp_size
        self._beta = build.linear(f"{prefix}.b_proj", hidden, heads, parallel="column")
        self._decay, self._gate = (
            (
                build.linear(f"{prefix}.{part}_a_proj", hidden, dim),
                build.linear(f"{prefix}.{part}_b_proj", dim, width, parallel="column"),
            )
            for part in "fg"
        )
        self._norm = build.norm(f"{prefix}.o_norm", dim, read.number("rms_norm_eps", default=1e-5))
        self._output = build.linear(f"{prefix}.o_proj", width, hidden, parallel="row")

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], normed; so wide is the result."""
        dt, gate = (last(first(x)) for first, last in (self._decay, self._gate))
        y = self.recur(self._qkv(x), dt, self._beta(x), context)
        shape = [x.shape[0], -1, self.spec.value_dim]
        return self._output(self._gated(y.reshape(shape), gate.reshape(shape)))

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Each head over its root mean square, times weight and sigmoid(gate), all in float32."""
        xp, wide, norm = self._xp, y.float(), self._norm
        normed = wide * xp.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + norm.eps)
        gated = norm.weight.float() * normed * xp.sigmoid(gate.float())
        return gated.to(y.dtype).reshape([y.shape[0], -1])


class KimiLinearForCausalLM(HybridLM, Glm4MoeForCausalLM):
    """layer_types, or linear_attn_config, says which blocks have which; the first ones are
    dense."""

    recurrent_name = "self_attn"
    only = {  # noqa: RUF012 - never changed
        "attention_bias": (False,),
        "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
        "tie_word_embeddings": (False,),
        "use_grouped_topk": (True,),
    }
    reads = (
        Glm4MoeForCausalLM.reads
        | _WORDS.keys()
        | {
            *("linear_attn_config", "linear_head_dim", "linear_num_heads", "kv_lora_rank"),
            *("qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        }
    )

    @classmethod
    def rotary(cls, read: ConfigReader) -> RotarySpec:
        """Nothing turns, whatever config.json says that can be computed."""
        read.rotary(read.size("qk_rope_head_dim"))
        return RotarySpec(read.size("qk_rope_head_dim"), 1.0, kind="none")

    @classmethod
    def attention(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """One rank's latent attention."""
        return latent_attention(read, cls.rotary(read), dtype)

    @classmethod
    def state(cls, read: ConfigReader, dtype: str) -> StateSpec:
        """One rank's delta nets."""
        dim = read.size("linear_head_dim", default=128)
        heads = read.divided("linear_num_heads", read.size("linear_num_heads", default=32))
        return StateSpec(
            kind="channel_delta",
            num_heads=heads,
            num_key_heads=heads,
            key_dim=dim,
            value_dim=dim,
            conv_parts=(heads * dim,) * 3,
            conv_width=read.size("linear_conv_kernel_dim", default=4),
            dtype=dtype,
        )

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        return super().shapes(_usual(config), tp_size, dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        mixtral_names(build)
        super().__init__(_usual(config), build)

    def attend(
        self,
        read: ConfigReader,
        build: ModelBuilder,
        prefix: str,
        spec: AttentionSpec,
        rotary: RotarySpec,
    ) -> AttentionLayer:
        """Latent attention."""
        return LatentAttention(build, prefix, latent_shape(read), spec, rotary)

    def recur(
        self, read: ConfigReader, build: ModelBuilder, prefix: str, spec: StateSpec
    ) -> AttentionLayer:
        """A delta net."""
        return KimiDelta(build, prefix, read, spec)


def _usual(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json in the words of other families."""
    named = {usual: config[own] for own, usual in _WORDS.items() if own in config}
    linear = config.get("linear_attn_config") or {}
    named |= {usual: linear[own] for own, usual in _LINEAR.items() if own in linear}
    count = int(config.get("num_hidden_layers", 0))
    if not config.get("layer_types"):
        full = linear.get("full_attn_layers")
        if not isinstance(full, list):
            raise ConfigError(
                "config.json of this KimiLinearForCausalLM says for no block what it is; expected "
                "layer_types, or linear_attn_config with full_attn_layers"
            )
        kinds = ("linear_attention", "full_attention")
        named["layer_types"] = [kinds[number + 1 in full] for number in range(count)]
    dense = config.get("mlp_layer_types")
    if dense:
        first = dense.count("dense")
        if dense != ["dense"] * first + ["sparse"] * (count - first):
            raise UnsupportedModel(
                f"mlp_layer_types of this KimiLinearForCausalLM is {dense}, which is not "
                "supported; possible: dense blocks in front of sparse ones"
            )
        named["first_k_dense_replace"] = first
    return {"routed_scaling_factor": 2.446, **config, **named}
