"""Granite 4 (transformers: GraniteMoeHybridForCausalLM): Mamba-2, and attention without positions
in some blocks; experts beside a shared block, or that alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.model import StateSpec
from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.errors import ConfigError, UnsupportedModel
from fastdeploy_core.layers import (
    ForwardContext,
    Linear,
    LinearPart,
    LinearShape,
    Placement,
    RMSNorm,
    RotarySpec,
)
from fastdeploy_core.models.reading import ConfigReader
from fd_models.gemma2 import ScaledEmbedding

from .gates import cell, gated_norm
from .layers import HybridLM, RecurrentLayer

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import AttentionLayer, Block, FeedForward, MakeFeedForward
    from fastdeploy_core.tensor import Tensor

# Names of the checkpoint, and those of other families for the same parts.
_EXPERTS = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.router.layer": "mlp.gate",
}


class Mamba2(RecurrentLayer):
    """One product for gate, convolved inputs and steps; a norm over each group of the gated
    result."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        hidden: int,
        spec: StateSpec,
        eps: float,
        *,
        biases: tuple[bool, bool],
    ) -> None:
        conv_bias, bias = biases
        super().__init__(build, prefix, spec, f"{prefix}.conv1d", conv_bias=conv_bias)
        self._width, self._eps = spec.num_heads * spec.value_dim, eps
        self._sizes = [self._width, sum(spec.conv_parts), spec.num_heads]
        # The checkpoint has these joined under the layer's name.
        names = zip("zxbct", (self._width, *spec.conv_parts, spec.num_heads), strict=True)
        parts = [LinearPart(f"{prefix}.in_proj_{name}", size) for name, size in names]
        self._product = Linear(build, LinearShape(f"{prefix}.in_proj", parts, hidden, bias=bias))
        self._norm = build.zeros((self._width,), build.xp.dtype(build.dtype))
        region = (slice(0, self._width),)
        place = Placement(f"{prefix}.norm.weight", (self._width,), region, self._accept, fill=1.0)
        build.weights.add(place)
        self._gated_norm = cell(build, gated_norm)
        self._output = build.linear(f"{prefix}.out_proj", self._width, hidden, bias=bias)

    def _accept(self, tensor: Tensor) -> None:
        self._norm[:] = tensor.to(self._norm.dtype)

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], normed; so wide is the result."""
        z, convolved, dt = self._xp.split(self._product(x), self._sizes, -1)
        y = self.recur(convolved, dt, None, context)
        groups = self.spec.num_key_heads
        shape = [x.shape[0], groups, self._width // groups]
        weight = self._norm.reshape(shape[1:])
        y = self._gated_norm(y.reshape(shape), z.reshape(shape), weight, self._eps, True)
        return self._output(y.reshape([x.shape[0], self._width]))


def refuse_ranks(read: ConfigReader) -> None:
    """UnsupportedModel for several ranks of Mamba-2: each would norm a part of a group."""
    if read.tp_size > 1:
        raise UnsupportedModel(
            f"{read.architecture} runs on one rank, since its norms go over the heads of all; "
            "possible: --tensor-parallel-size 1"
        )


@dataclass(slots=True)
class ScaledLayer:
    """One block whose branches are multiplied by a constant before they are added."""

    input_norm: RMSNorm
    mixer: AttentionLayer
    post_norm: RMSNorm
    feed_forward: FeedForward
    scale: float
    select_rows: Callable[[Tensor, Tensor], Tensor]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As DecoderLayer; the sums are made here, because a factor stands before them."""
        x = x if residual is None else x + residual
        mixed = self.mixer(self.input_norm(x), positions, context)
        if rows is not None:
            mixed, x = self.select_rows(mixed, rows), self.select_rows(x, rows)
        x = x + mixed * self.scale
        return x + self.feed_forward(self.post_norm(x)) * self.scale, None


class GraniteMoeHybridForCausalLM(HybridLM):
    """Mamba-2 in most blocks; constants multiply embeddings, branches, attention and logits."""

    qkv_bias = output_bias = "attention_bias"
    recurrent = frozenset({"linear_attention", "mamba"})
    other_layers = recurrent | {"attention"}
    recurrent_name = "mamba"
    only = {  # noqa: RUF012 - never changed
        "normalization_function": ("rmsnorm",),
        "time_step_limit": ([0.0, inf], [0.0, {"__float__": "Infinity"}]),
    }
    reads = frozenset(
        {
            *("attention_multiplier", "embedding_multiplier", "logits_scaling", "mamba_chunk_size"),
            *("mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand"),
            *("mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "position_embedding_type"),
            *("residual_multiplier", "shared_intermediate_size"),
        }
    )

    @classmethod
    def check(cls, read: ConfigReader) -> None:
        """On one rank."""
        super().check(read)
        refuse_ranks(read)

    @classmethod
    def state(cls, read: ConfigReader, dtype: str) -> StateSpec:
        """The Mamba-2 layers."""
        heads, groups = read.size("mamba_n_heads"), read.size("mamba_n_groups", default=1)
        inner = read.size("mamba_expand", default=2) * read.size("hidden_size")
        # Older releases write "auto".
        auto = read.config.get("mamba_d_head") == "auto"
        dim = inner // heads if auto else read.size("mamba_d_head", default=inner // heads)
        size = read.size("mamba_d_state", default=256)
        if heads % groups:
            raise ConfigError(
                f"config.json of this {read.architecture} has mamba_n_heads={heads}; expected a "
                f"multiple of mamba_n_groups {groups}"
            )
        return StateSpec(
            kind="space",
            num_heads=heads,
            num_key_heads=groups,
            key_dim=size,
            value_dim=dim,
            conv_parts=(heads * dim, groups * size, groups * size),
            conv_width=read.size("mamba_d_conv", default=4),
            dtype=dtype,
        )

    @classmethod
    def attention(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """With a scale of its own."""
        scale = read.number("attention_multiplier", default=1.0)
        return replace(super().attention(read, dtype), scale=scale)

    @classmethod
    def rotary(cls, read: ConfigReader) -> RotarySpec:
        """Without positions nothing turns."""
        turning = super().rotary(read)
        if read.config.get("position_embedding_type") == "rope":
            return turning
        return RotarySpec(read.head_dim(), 1.0, kind="none")

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec | None:
        """One rank's experts, if there are any."""
        if not read.count("num_local_experts", default=0):
            return None
        routing = RoutingSpec(
            num_experts=read.size("num_local_experts"),
            top_k=read.size("num_experts_per_tok"),
            scoring="softmax",
            renormalize=True,
        )
        return read.experts(routing, dtype, width_key="intermediate_size")

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        self._scale = read.number("residual_multiplier", default=1.0)
        self._logits_scale = read.number("logits_scaling", default=1.0)
        has_experts = self.moe(read, build.dtype) is not None
        shared = "mlp.shared_experts" if has_experts else "mlp"
        names = _EXPERTS if has_experts else {}
        names = {**names, "shared_mlp.input_linear": f"{shared}.gate_up_proj"}
        for old, new in {**names, "shared_mlp.output_linear": f"{shared}.down_proj"}.items():
            build.weights.rename(old, new)
        super().__init__(config, build)
        factor = read.number("embedding_multiplier", default=1.0)
        self.embedding: Any = ScaledEmbedding(build, self.embedding, factor)

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts with shared ones, or the shared ones alone."""
        moe, hidden = self.moe(read, dtype), read.size("hidden_size")
        shared = read.size("shared_intermediate_size")

        def make(build: ModelBuilder, prefix: str, number: int) -> FeedForward:
            if moe is None:
                return build.mlp(prefix, hidden, shared)
            width = read.size("intermediate_size")
            return build.moe_block(prefix, moe, width, shared_intermediate=shared)

        return make

    def recur(
        self, read: ConfigReader, build: ModelBuilder, prefix: str, spec: StateSpec
    ) -> AttentionLayer:
        """A Mamba-2 layer."""
        biases = (
            read.flag("mamba_conv_bias", default=True),
            read.flag("mamba_proj_bias", default=False),
        )
        return Mamba2(build, prefix, self._hidden, spec, self._eps, biases=biases)

    def block(self, build: ModelBuilder, prefix: str, number: int) -> Block:
        """One block with that checkpoint prefix."""
        size, eps = self._hidden, self._eps
        return ScaledLayer(
            input_norm=build.norm(f"{prefix}.input_layernorm", size, eps),
            mixer=self._attention(build, f"{prefix}.self_attn", number),
            post_norm=build.norm(f"{prefix}.post_attention_layernorm", size, eps),
            feed_forward=self._feed_forward(build, f"{prefix}.mlp", number),
            scale=self._scale,
            select_rows=build.kernels["select_rows"],
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Divided by a constant; the likeliest token is the same."""
        return super().compute_logits(hidden) / self._logits_scale
