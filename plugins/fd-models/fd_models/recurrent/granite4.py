"""Granite 4 (transformers: GraniteMoeHybridForCausalLM): Mamba-2, and attention without positions
in some blocks; experts beside a shared block, or that alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.model import StateSpec
from fastdeploy_core.contracts.moe import MoESpec
from fastdeploy_core.errors import ConfigError, UnsupportedModel
from fastdeploy_core.layers import (
    ForwardContext,
    Linear,
    LinearPart,
    LinearShape,
    Placement,
    RotarySpec,
)
from fastdeploy_core.models.reading import ConfigReader
from fd_models.blocks.granite import (
    EXPERTS,
    MULTIPLIERS,
    GraniteForCausalLM,
    GraniteMoeForCausalLM,
)

from .gates import cell, gated_norm
from .layers import HybridLM, RecurrentLayer

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import AttentionLayer, FeedForward, MakeFeedForward
    from fastdeploy_core.tensor import Tensor


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


class GraniteMoeHybridForCausalLM(GraniteForCausalLM, HybridLM):
    """Mamba-2 in most blocks; the constants of Granite 3."""

    recurrent = frozenset({"linear_attention", "mamba"})
    other_layers = recurrent | {"attention"}
    recurrent_name = "mamba"
    only = {  # noqa: RUF012 - never changed
        "normalization_function": ("rmsnorm",),
        "time_step_limit": ([0.0, inf], [0.0, {"__float__": "Infinity"}]),
    }
    reads = MULTIPLIERS | {
        *("mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state"),
        *("mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias"),
        *("position_embedding_type", "shared_intermediate_size"),
    }

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
    def rotary(cls, read: ConfigReader) -> RotarySpec:
        """Without positions nothing turns."""
        turning = super().rotary(read)
        if read.config.get("position_embedding_type") == "rope":
            return turning
        return RotarySpec(read.head_dim(), 1.0, kind="none")

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec | None:
        """One rank's experts, if there are any."""
        has_any = read.count("num_local_experts", default=0)
        return GraniteMoeForCausalLM.moe(read, dtype) if has_any else None

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        has_experts = self.moe(read, build.dtype) is not None
        shared = "mlp.shared_experts" if has_experts else "mlp"
        names = EXPERTS if has_experts else {}
        names = {**names, "shared_mlp.input_linear": f"{shared}.gate_up_proj"}
        for old, new in {**names, "shared_mlp.output_linear": f"{shared}.down_proj"}.items():
            build.weights.rename(old, new)
        super().__init__(config, build)

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
