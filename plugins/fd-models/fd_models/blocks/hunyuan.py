"""Hunyuan of 2025, dense and with experts (transformers: HunYuanDenseV1ForCausalLM,
HunYuanMoEV1ForCausalLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.errors import UnsupportedModel
from fastdeploy_core.layers import ForwardContext, RotarySpec
from fastdeploy_core.models.decoder import DecoderLM
from fastdeploy_core.models.reading import ConfigReader
from fd_models.fields import StrictLM

from .projected import ProjectedAttention, whole_heads

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.contracts.model import ModelShapes
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import MakeFeedForward
    from fastdeploy_core.tensor import Tensor


class TurnedFirst(ProjectedAttention):
    """Queries and keys turn before their heads are normalised, so no driver may turn them."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        read: ConfigReader,
        spec: AttentionSpec,
        rotary: RotarySpec,
    ) -> None:
        super().__init__(build, prefix, read, spec, RotarySpec(rotary.dim, 1.0, kind="none"))
        self._table, self._turn = build.cos_sin(rotary), build.kernels["rotary_embedding"]
        self._norm, eps = build.kernels["qk_norm"], read.number("rms_norm_eps", default=1e-5)
        self._of_q, self._of_k = (
            build.norm(f"{prefix}.{name}_layernorm", spec.head_dim, eps)
            for name in ("query", "key")
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor:
        """As ProjectedAttention.attend."""
        q, k = self._turn(q, k, positions, self._table, False)
        q, k = self._norm(q, k, self._of_q.weight, self._of_k.weight, self._of_q.eps)
        return self.paged.attend(q, k, v, (k, v), context)


class HunYuanDenseV1ForCausalLM(StrictLM):
    """Heads are normalised after they turn; released folders have a wider base in the place of
    scaled positions."""

    norm_eps = 1e-5
    only = {  # noqa: RUF012 - never changed
        "norm_type": ("rms", "hf_rms"),
        "position_embedding_xdrope": (False,),
        "qk_norm": (True,),
        "use_cla": (False,),
        "use_mla": (False,),
        "use_qk_norm": (True,),
        "use_rotary_pos_emb": (True,),
    }
    reads = frozenset({"attention_head_dim", "cla_share_factor"})

    @classmethod
    def check(cls, read: ConfigReader) -> None:
        """No more ranks than key heads."""
        super().check(read)
        whole_heads(read)

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        return super().shapes(_with_wide_base(config), tp_size, dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(_with_wide_base(config), build.tp_size)
        spec, rotary = self.attention(read, build.dtype), self.rotary(read)
        DecoderLM.__init__(
            self,
            read,
            build,
            attention=lambda build, prefix, _: TurnedFirst(build, prefix, read, spec, rotary),
            feed_forward=self.make_feed_forward(read, build.dtype),
        )


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    """Experts beside a shared one in every block."""

    only = {  # noqa: RUF012 - never changed
        **HunYuanDenseV1ForCausalLM.only,
        "norm_topk_prob": (True,),
        "use_mixed_mlp_moe": (True,),
    }
    reads = HunYuanDenseV1ForCausalLM.reads | {"num_experts", "num_shared_expert"}

    @classmethod
    def check(cls, read: ConfigReader) -> None:
        """Blocks do not differ, and an expert is as wide as the shared one."""
        super().check(read)
        width = read.size("intermediate_size")
        for key, wanted in (("num_shared_expert", 1), ("moe_intermediate_size", width)):
            if _one_for_all(read, key, default=wanted) != wanted:
                raise UnsupportedModel(
                    f"config.json of this {read.architecture} has {key}={read.config[key]!r}, "
                    f"which is not supported; possible: {wanted}"
                )

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        build.weights.rename(".mlp.gate.wg.", ".mlp.gate.")
        build.weights.rename(".mlp.shared_mlp.", ".mlp.shared_experts.")
        super().__init__(config, build)

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts."""
        routing = RoutingSpec(
            num_experts=_one_for_all(read, "num_experts", "num_local_experts", default=1),
            top_k=_one_for_all(read, "moe_topk", "num_experts_per_tok", default=1),
            scoring="softmax",
            renormalize=True,
        )
        return read.experts(routing, dtype, width_key="intermediate_size")

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts."""
        moe, width = self.moe(read, dtype), read.size("intermediate_size")
        return lambda build, prefix, _: build.moe_block(
            prefix, moe, width, shared_intermediate=width
        )


def _one_for_all(read: ConfigReader, *keys: str, default: int) -> int:
    """A whole number, or the one that a list says for each block."""
    given = next((read.config[key] for key in keys if read.config.get(key) is not None), default)
    if isinstance(given, list) and given and all(each == given[0] for each in given):
        given = given[0]
    return ConfigReader({**read.config, keys[0]: given}).size(keys[0])


def _with_wide_base(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A fixed alpha, which released folders call dynamic, is a base of its own."""
    read, key = ConfigReader(config), "rope_parameters"
    rope = config.get(key) or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "dynamic" or not rope.get("alpha"):
        return config
    dim, alpha = read.head_dim(), ConfigReader(rope).number("alpha", default=1.0)
    base = ConfigReader({**config, **rope}).number("rope_theta", default=10000.0)
    return {
        **config,
        key: {"rope_type": "default", "rope_theta": base * alpha ** (dim / (dim - 2))},
    }
