"""Nemotron-H and Nemotron 3 (transformers: NemotronHForCausalLM; arXiv 2504.03624): every block has
one norm and one of Mamba-2, attention without positions, a dense block, and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.contracts.model import ModelShapes, StateSpec
from fastdeploy_core.contracts.moe import RoutingSpec
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.layers import (
    Linear,
    LinearPart,
    LinearShape,
    Placement,
    RMSNorm,
    RotarySpec,
)
from fastdeploy_core.models.reading import ConfigReader
from fd_models.clamped import MOST_AT_ONCE

from .granite4 import Mamba2, refuse_ranks
from .layers import HybridLM

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.layers import ForwardContext, ModelBuilder
    from fastdeploy_core.models.decoder import AttentionLayer, Block
    from fastdeploy_core.tensor import Tensor

# Letters of hybrid_override_pattern, and older words, for those of layers_block_type.
_KINDS: Final = {
    **{"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"},
    **{"mamba": "linear_attention", "attention": "full_attention"},
}


class SquaredMLP:
    """down(relu(up(x))^2)."""

    def __init__(
        self, build: ModelBuilder, prefix: str, hidden: int, width: int, *, bias: bool = False
    ) -> None:
        self._xp = build.xp
        self._up = build.linear(f"{prefix}.up_proj", hidden, width, bias=bias)
        self._down = build.linear(f"{prefix}.down_proj", width, hidden, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden], model dtype; so is the result."""
        return self._down(self._squared(self._up(x)))

    def after(
        self, norm: RMSNorm, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Two addends of t + block(norm(t)) with t = x + residual."""
        hidden, total = self._up.after(norm, x, residual)
        return self._down.add_to(total, self._squared(hidden))

    def _squared(self, x: Tensor) -> Tensor:
        positive = self._xp.clamp(x, 0.0, None)
        return positive * positive


class SquaredExperts:
    """Experts without gates beside a shared one, between two products of their own if they are
    narrower than the model.

    Plain tensor code: no kernel of a device takes these experts yet.
    """

    def __init__(self, build: ModelBuilder, prefix: str, read: ConfigReader) -> None:
        self._xp, self._device, hidden = build.xp, build.device, read.size("hidden_size")
        bias = read.flag("mlp_bias", default=False)
        self._routing = RoutingSpec(
            num_experts=read.size("n_routed_experts"),
            top_k=read.size("num_experts_per_tok"),
            scoring="sigmoid",
            renormalize=read.flag("norm_topk_prob", default=True),
            scaling_factor=read.number("routed_scaling_factor", default=1.0),
            num_groups=read.size("n_group", default=1),
            top_k_groups=read.size("topk_group", default=1),
            has_correction_bias=True,
        )
        count, width = self._routing.num_experts, read.size("moe_intermediate_size")
        router = [LinearPart(f"{prefix}.gate", count)]
        self._router = Linear(
            build, LinearShape(f"{prefix}.gate", router, hidden, quantize=False, is_float32=True)
        )
        self._scores, self._route = build.kernels["linear_float32"], build.kernels["moe_routing"]
        self._bias = build.zeros((count,), build.xp.float32)
        name = f"{prefix}.gate.e_score_correction_bias"
        build.weights.add(Placement(name, (count,), (slice(0, count),), self._accept, fill=0.0))
        latent = read.count("moe_latent_size", default=0)
        self._enter: Callable[[Tensor], Tensor] | None = None
        if latent:
            self._enter = build.linear(f"{prefix}.fc1_latent_proj", hidden, latent, bias=bias)
            self._leave = build.linear(f"{prefix}.fc2_latent_proj", latent, hidden, bias=bias)
        # Experts see some of a step's rows, which adapters cannot tell from others.
        adapters, build.adapters = build.adapters, None
        self._experts = [
            SquaredMLP(build, f"{prefix}.experts.{number}", latent or hidden, width)
            for number in range(count)
        ]
        build.adapters = adapters
        width = read.size("moe_shared_expert_intermediate_size")
        self._shared = SquaredMLP(build, f"{prefix}.shared_experts", hidden, width, bias=bias)

    def _accept(self, stored: Tensor) -> None:
        self._bias[:] = stored.float()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden], model dtype; so is the result."""
        scores = self._scores(x, self._router.weight)
        ids, weights = self._route(scores, self._bias, self._routing)
        if self._enter is None:
            routed = self._routed(x, ids, weights)
        else:
            routed = self._leave(self._routed(self._enter(x), ids, weights))
        return routed + self._shared(x)

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        xp, put, top_k = self._xp, self._device.to_device, self._routing.top_k
        total = xp.zeros_like(x.float())
        if self._device.limits.graph_capture and x.shape[0] <= MOST_AT_ONCE:
            # Captured steps cannot ask the device who chose what: every expert computes all.
            for number, expert in enumerate(self._experts):
                share = (weights * (ids == number).to(weights.dtype)).sum(dim=1, keepdim=True)
                total = total + expert(x).float() * share
            return total.to(x.dtype)
        weights = weights.reshape([-1])
        chosen = xp.to_numpy(ids)
        for expert in np.unique(chosen).tolist():
            tokens, nth = np.nonzero(chosen == expert)
            rows, places = put(tokens), put(tokens * top_k + nth)
            share = xp.index_select(weights, 0, places).unsqueeze(1)
            y = self._experts[expert](xp.index_select(x, 0, rows))
            total = xp.index_add_(total, 0, rows, y.float() * share)
        return total.to(x.dtype)

    def after(
        self, norm: RMSNorm, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Two addends of t + experts(norm(t)) with t = x + residual."""
        normed, total = norm.add(x, residual)
        return self(normed), total


@dataclass(slots=True)
class FeedForwardAlone:
    """A block that looks at no other token."""

    norm: RMSNorm
    mixer: SquaredMLP | SquaredExperts
    select_rows: Callable[[Tensor, Tensor], Tensor]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As DecoderLayer."""
        if rows is not None:
            x = self.select_rows(x, rows)
            residual = None if residual is None else self.select_rows(residual, rows)
        return self.mixer.after(self.norm, x, residual)


@dataclass(slots=True)
class MixerAlone:
    """A block that has attention, or a recurrent layer, and nothing after it."""

    norm: RMSNorm
    mixer: AttentionLayer

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As DecoderLayer."""
        return self.mixer.after(self.norm, x, residual, positions, context, rows)


class NemotronHForCausalLM(HybridLM):
    """One mixer a block."""

    activations = ("relu2",)
    other_layers = HybridLM.recurrent | {"mlp", "moe"}
    recurrent_name = "mixer"
    only = {  # noqa: RUF012 - never changed
        "attention_bias": (False,),
        "mamba_hidden_act": ("silu", "swish"),
        "residual_in_fp32": (False,),
        "sliding_window": (0,),
        "tie_word_embeddings": (False,),
        "time_step_limit": ([0.0, inf], [0.0, {"__float__": "Infinity"}], [0, inf]),
    }
    reads = frozenset(
        {
            *(
                "chunk_size",
                "conv_kernel",
                "hybrid_override_pattern",
                "layer_norm_epsilon",
                "layers_block_type",
            ),
            *("mamba_head_dim", "mamba_num_heads", "mlp_bias", "mlp_hidden_act", "moe_latent_size"),
            *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_group"),
            *("n_groups", "n_routed_experts", "n_shared_experts", "norm_topk_prob"),
            *("routed_scaling_factor", "ssm_state_size", "topk_group", "use_bias", "use_conv_bias"),
            # Of training, of initial weights, and of how others compute the same numbers.
            *("mamba_proj_bias", "moe_shared_expert_overlap", "rescale_prenorm_residual"),
            "mtp_hybrid_override_pattern",
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
        heads, groups = read.size("mamba_num_heads"), read.size("n_groups", default=8)
        dim, size = read.size("mamba_head_dim"), read.size("ssm_state_size", default=128)
        if heads % groups:
            raise ConfigError(
                f"config.json of this {read.architecture} has mamba_num_heads={heads}; expected a "
                f"multiple of n_groups {groups}"
            )
        return StateSpec(
            kind="space",
            num_heads=heads,
            num_key_heads=groups,
            key_dim=size,
            value_dim=dim,
            conv_parts=(heads * dim, groups * size, groups * size),
            conv_width=read.size("conv_kernel", default=4),
            dtype=dtype,
        )

    @classmethod
    def rotary(cls, read: ConfigReader) -> RotarySpec:
        """Nothing turns, whatever config.json says that can be computed."""
        super().rotary(read)
        return RotarySpec(read.head_dim(), 1.0, kind="none")

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank; many blocks keep nothing."""
        usual = _usual(config)
        shapes = super().shapes(usual, tp_size, dtype)
        pairs = zip(usual["layer_types"], shapes.layers, strict=True)
        return replace(shapes, layers=tuple(s for kind, s in pairs if kind not in ("mlp", "moe")))

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        for old, new in (
            ("backbone.", "model."),
            ("model.embeddings.", "model.embed_tokens."),
            ("model.norm_f.", "model.norm."),
        ):
            build.weights.rename(old, new)
        build.weights.ignore("mtp.")
        usual = _usual(config)
        self._read = ConfigReader(usual, build.tp_size)
        super().__init__(usual, build)

    def block(self, build: ModelBuilder, prefix: str, number: int) -> Block:
        """One block with that checkpoint prefix."""
        norm, read = build.norm(f"{prefix}.norm", self._hidden, self._eps), self._read
        kind, name = read.config["layer_types"][number], f"{prefix}.mixer"
        if kind not in ("mlp", "moe"):
            return MixerAlone(norm, self._attention(build, f"{prefix}.self_attn", number))
        mixer: SquaredMLP | SquaredExperts
        if kind == "moe":
            mixer = SquaredExperts(build, name, read)
        else:
            width, bias = read.size("intermediate_size"), read.flag("mlp_bias", default=False)
            mixer = SquaredMLP(build, name, self._hidden, width, bias=bias)
        return FeedForwardAlone(norm, mixer, build.kernels["select_rows"])

    def attend(
        self,
        read: ConfigReader,
        build: ModelBuilder,
        prefix: str,
        spec: AttentionSpec,
        rotary: RotarySpec,
    ) -> AttentionLayer:
        """Attention, which has the name of every mixer."""
        prefix = prefix.removesuffix("self_attn") + self.recurrent_name
        return build.gqa(prefix, read.heads(), spec, rotary)

    def recur(
        self, read: ConfigReader, build: ModelBuilder, prefix: str, spec: StateSpec
    ) -> AttentionLayer:
        """A Mamba-2 layer."""
        biases = (
            read.flag("use_conv_bias", default=True),
            read.flag("use_bias", default=False),
        )
        return Mamba2(build, prefix, self._hidden, spec, self._eps, biases=biases)


def _usual(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json in the words of other families."""
    words = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    kinds = next((config[word] for word in words if config.get(word)), None)
    if not kinds:
        raise ConfigError(
            "config.json of this NemotronHForCausalLM says for no block what it is; expected "
            "layers_block_type or hybrid_override_pattern"
        )
    named = [_KINDS.get(str(kind), str(kind)) for kind in kinds]
    return {
        **config,
        "hidden_act": config.get("mlp_hidden_act", "relu2"),
        "layer_types": named,
        "num_hidden_layers": len(named),
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }
