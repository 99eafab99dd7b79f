"""Qwen3-Next (transformers: Qwen3NextForCausalLM): gated delta nets, and gated attention in every
fourth block; experts beside a gated shared one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.model import StateSpec
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.layers import (
    ForwardContext,
    Linear,
    LinearPart,
    LinearShape,
    PagedAttention,
    RMSNorm,
)
from fastdeploy_core.models.reading import ConfigReader
from fd_models.qwen2_moe import Qwen2MoeForCausalLM

from .gates import add_gated, cell, gated_norm, regroup
from .layers import HybridLM, RecurrentLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastdeploy_core.contracts.moe import MoESpec
    from fastdeploy_core.layers import ModelBuilder, RotarySpec
    from fastdeploy_core.models.decoder import AttentionLayer, Block
    from fastdeploy_core.tensor import Tensor

DELTA_FIELDS = frozenset(
    {
        *("full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"),
        *("norm_topk_prob", "partial_rotary_factor"),
    }
)


class GatedAttention:
    """Grouped-query attention whose query heads each bring a gate: sigmoid(gate) * attended, before
    the output's product. Query and key heads are normed."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        read: ConfigReader,
        spec: AttentionSpec,
        rotary: RotarySpec,
    ) -> None:
        shape, dim = read.heads(), spec.head_dim
        if build.tp_size > shape.num_kv_heads:
            read.divided("num_key_value_heads", shape.num_kv_heads)
        parts = [
            LinearPart(f"{prefix}.q_proj", 2 * shape.num_heads * dim, build.piece),
            LinearPart(f"{prefix}.k_proj", shape.num_kv_heads * dim, build.piece),
            LinearPart(f"{prefix}.v_proj", shape.num_kv_heads * dim, build.piece),
        ]
        column = LinearShape(f"{prefix}.qkv_proj", parts, shape.hidden, parallel="column")
        self._qkv = Linear(build, column)
        self._output = build.linear(
            f"{prefix}.o_proj", shape.num_heads * dim, shape.hidden, parallel="row"
        )
        eps = read.number("rms_norm_eps", default=1e-6)
        self._q_norm = build.norm(f"{prefix}.q_norm", dim, eps)
        self._k_norm = build.norm(f"{prefix}.k_norm", dim, eps)
        self._norm = build.kernels["qk_norm"]
        self._paged = PagedAttention(build, prefix, spec, rotary)
        self._add_gated, self._spec = cell(build, add_gated), spec

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], model dtype; positions: [num_tokens] int64."""
        return self._output(self._attend(self._qkv(x), positions, context))

    def after(
        self,
        norm: RMSNorm,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As AttentionLayer.after."""
        qkv, total = self._qkv.after(norm, x, residual)
        attended = self._attend(qkv, positions, context)
        attended, total = self._paged.select(rows, attended, total)
        return self._output.add_to(total, attended)

    def _attend(self, qkv: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        heads, kv, dim = self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim
        tokens, first = qkv.shape[0], 2 * heads * dim
        both = qkv[:, :first].reshape([tokens, heads, 2 * dim])
        q, gate = both[:, :, :dim].contiguous(), both[:, :, dim:]
        k = qkv[:, first : first + kv * dim].reshape([tokens, kv, dim])
        v = qkv[:, first + kv * dim :].reshape([tokens, kv, dim])
        weights = (self._q_norm.weight, self._k_norm.weight)
        q, k = self._norm(q, k, *weights, self._q_norm.eps)
        if not self._paged.rotates:
            q, k = self._paged.rotate(q, k, positions, context.rotary)
        y = self._paged.attend(q, k, v, (k, v), context)
        opened: Tensor = self._add_gated(None, gate, y)
        return opened


class DeltaNet(RecurrentLayer):
    """The gated delta net. Its products are two, whose rows stand in groups by key head."""

    def __init__(
        self, build: ModelBuilder, prefix: str, read: ConfigReader, spec: StateSpec
    ) -> None:
        super().__init__(build, prefix, spec, f"{prefix}.conv1d")
        hidden, values = read.size("hidden_size"), spec.num_heads * spec.value_dim * build.tp_size
        self._place_products(build, prefix, hidden)
        self._norm = build.norm(
            f"{prefix}.norm", spec.value_dim, read.number("rms_norm_eps", default=1e-6)
        )
        self._gated_norm, self._regroup = cell(build, gated_norm), cell(build, regroup)
        self._output = build.linear(f"{prefix}.out_proj", values, hidden, parallel="row")

    def _place_products(self, build: ModelBuilder, prefix: str, hidden: int) -> None:
        spec, size = self.spec, build.tp_size
        wide = (sum(spec.conv_parts) + spec.num_heads * spec.value_dim) * size
        self._qkvz = build.linear(f"{prefix}.in_proj_qkvz", hidden, wide, parallel="column")
        gates = 2 * spec.num_heads * size
        self._ba = build.linear(
            f"{prefix}.in_proj_ba", hidden, gates, parallel="column", quantize=False
        )

    def _products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each token q|k|v, z, b and a: one head after the other."""
        spec = self.spec
        keys, each = spec.num_key_heads, spec.num_heads // spec.num_key_heads
        sizes = (spec.key_dim, spec.key_dim, each * spec.value_dim, each * spec.value_dim)
        wide = self._regroup(self._qkvz(x), keys, sizes)
        gates, channels = self._regroup(self._ba(x), keys, (each, each)), sum(spec.conv_parts)
        b, a = gates[:, : spec.num_heads], gates[:, spec.num_heads :]
        return wide[:, :channels], wide[:, channels:], b, a

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], normed; so wide is the result."""
        qkv, z, b, a = self._products(x)
        shape = [x.shape[0], self.spec.num_heads, self.spec.value_dim]
        y = self.recur(qkv, a, b, context).reshape(shape)
        y = self._gated_norm(y, z.reshape(shape), self._norm.weight, self._norm.eps, False)
        return self._output(y.reshape([x.shape[0], -1]))


def delta_spec(read: ConfigReader, dtype: str) -> StateSpec:
    """One rank's gated delta nets."""
    keys, values = read.size("linear_num_key_heads"), read.size("linear_num_value_heads")
    if values % keys:
        raise ConfigError(
            f"config.json of this {read.architecture} has linear_num_value_heads={values}; "
            f"expected a multiple of linear_num_key_heads {keys}"
        )
    keys = read.divided("linear_num_key_heads", keys)
    values = read.divided("linear_num_value_heads", values)
    key_dim, value_dim = read.size("linear_key_head_dim"), read.size("linear_value_head_dim")
    return StateSpec(
        kind="delta",
        num_heads=values,
        num_key_heads=keys,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_parts=(keys * key_dim, keys * key_dim, values * value_dim),
        conv_width=read.size("linear_conv_kernel_dim", default=4),
        dtype=dtype,
    )


def accept_less_one(accept: Callable[[Tensor], None], stored: Tensor) -> None:
    """Checkpoints hold w - 1; it is added in float32."""
    accept(stored.float() + 1.0)


def _lift_norms(build: ModelBuilder) -> None:
    """Of all norms that were placed so far, but those after a recurrence."""
    for placement in build.weights.placements.values():
        name = placement.name
        is_norm = name.endswith("norm.weight") or ".pre_fc_norm_" in name
        if is_norm and not name.endswith("linear_attn.norm.weight"):
            placement.accept = partial(accept_less_one, placement.accept)


class DeltaLM(HybridLM):
    """Gated delta nets, and gated attention in some blocks; norms stored as w - 1 but for those
    after a recurrence."""

    head_norms = True
    partial_rotary = 0.25
    qkv_bias = output_bias = False
    only = {"attention_bias": (False,)}  # noqa: RUF012 - never changed
    uses_window = False
    recurrent_name = "linear_attn"

    @classmethod
    def is_recurrent(cls, read: ConfigReader, number: int) -> bool:
        """All but every fourth block, if layer_types does not say; none after the last."""
        if number >= read.size("num_hidden_layers"):
            return False
        if read.config.get("layer_types"):
            return super().is_recurrent(read, number)
        return bool((number + 1) % read.size("full_attention_interval", default=4))

    @classmethod
    def state(cls, read: ConfigReader, dtype: str) -> StateSpec:
        """One rank's gated delta nets."""
        return delta_spec(read, dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        build.weights.keep("mtp.")
        super().__init__(config, build)
        _lift_norms(build)

    def block(self, build: ModelBuilder, prefix: str, number: int) -> Block:
        """One block; those of drafters have full attention, and their norms are lifted with it."""
        made = super().block(build, prefix, number)
        if prefix.startswith("mtp."):
            _lift_norms(build)
        return made

    def attend(
        self,
        read: ConfigReader,
        build: ModelBuilder,
        prefix: str,
        spec: AttentionSpec,
        rotary: RotarySpec,
    ) -> AttentionLayer:
        """Gated attention."""
        return GatedAttention(build, prefix, read, spec, rotary)

    def recur(
        self, read: ConfigReader, build: ModelBuilder, prefix: str, spec: StateSpec
    ) -> AttentionLayer:
        """A gated delta net."""
        return DeltaNet(build, prefix, read, spec)


class Qwen3NextForCausalLM(DeltaLM, Qwen2MoeForCausalLM):
    """Experts in every block but those that mlp_only_layers or decoder_sparse_step leave out."""

    qkv_bias = False
    only = DeltaLM.only
    reads = Qwen2MoeForCausalLM.reads | DELTA_FIELDS

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts, whose weights are renormalised if config.json does not say."""
        spec = super().moe(read, dtype)
        renormalize = read.flag("norm_topk_prob", default=True)
        return replace(spec, routing=replace(spec.routing, renormalize=renormalize))
