"""Llama 4's text model (transformers: Llama4ForCausalLM): attention within chunks, in every fourth
block over everything and without positions; one expert for each token beside a shared one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.errors import UnsupportedModel
from fastdeploy_core.layers import ForwardContext, RMSNorm, RotarySpec
from fastdeploy_core.models.decoder import DecoderLM
from fastdeploy_core.models.reading import ConfigReader

from .blocks.projected import ProjectedAttention, whole_heads
from .fields import StrictLM, has_positions

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.contracts.model import StoredTensor
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import FeedForward, MakeFeedForward
    from fastdeploy_core.tensor import Tensor


class ChunkedAttention(ProjectedAttention):
    """Grouped-query attention. Where heads turn, they are made as long as sqrt(head_dim) first,
    since turning leaves their length alone; where they do not, queries grow with their position."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        read: ConfigReader,
        spec: AttentionSpec,
        rotary: RotarySpec,
    ) -> None:
        super().__init__(build, prefix, read, spec, rotary)
        self._xp, dim = build.xp, spec.head_dim
        turns = rotary.kind != "none"
        self._ones: Tensor | None = None
        if turns and read.flag("use_qk_norm", default=True):
            self._ones = build.zeros((dim,), build.xp.dtype(build.dtype)) + 1
            self._eps = read.number("rms_norm_eps", default=1e-5)
            self._norm = build.kernels["qk_norm"]
        # Released folders have numbers where others have true.
        self._grows = not turns and bool(read.config.get("attn_temperature_tuning", True))
        self._floor = read.size("floor_scale", default=8192)
        self._growth = read.number("attn_scale", default=0.1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor:
        """As ProjectedAttention.attend."""
        xp = self._xp
        if self._ones is not None:
            q, k = self._norm(q, k, self._ones, self._ones, self._eps)
        if self._grows:
            steps = (positions + 1) // self._floor
            grown = xp.log1p(steps.float()) * self._growth + 1
            q = (q.float() * grown.reshape([-1, 1, 1])).to(q.dtype)
        if not self.paged.rotates:
            q, k = self.paged.rotate(q, k, positions, context.rotary)
        return self.paged.attend(q, k, v, (k, v), context)


class ScaledExperts:
    """The likeliest expert of x times the sigmoid of its score, and the shared one of x."""

    def __init__(self, build: ModelBuilder, prefix: str, spec: MoESpec, width: int) -> None:
        self._xp, self._scores = build.xp, build.kernels["linear_float32"]
        self._router = build.zeros((spec.routing.num_experts, spec.hidden_size), build.xp.float32)
        # A longer x has the same likeliest expert, so that the block may route by what it is given.
        self._block = build.moe_block(prefix, spec, width)
        placement = build.weights.placements[f"{prefix}.gate.weight"]
        placement.accept = partial(self._accept, placement.accept)
        self._shared = build.mlp(f"{prefix}.shared_expert", spec.hidden_size, width)

    def _accept(self, accept: Callable[[Tensor], None], stored: Tensor) -> None:
        self._router[:] = stored.float()
        accept(stored)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden], model dtype; so is the result."""
        best = self._scores(x, self._router).amax(-1, keepdim=True)
        return self._block(x * self._xp.sigmoid(best).to(x.dtype)) + self._shared(x)

    def after(
        self, norm: RMSNorm, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Two addends of t + experts(norm(t)) with t = x + residual."""
        normed, total = norm.add(x, residual)
        return self(normed), total


class _Transposed:
    """A StoredTensor with its last two dimensions swapped."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored, self.dtype = stored, stored.dtype
        self.shape = (*stored.shape[:-2], stored.shape[-1], stored.shape[-2])

    def read(self, *region: slice | int) -> Tensor:
        """As StoredTensor.read."""
        full: list[slice | int] = [*region]
        full += [slice(None)] * (len(self.shape) - len(full))
        return self._stored.read(*full[:-2], full[-1], full[-2]).transpose(-1, -2)


class Llama4ForCausalLM(StrictLM):
    """Chunks and rotation in most blocks; dense blocks between those with experts, or none."""

    interleaved = True
    norm_eps = 1e-5
    rope_theta = 500000.0
    other_layers = frozenset({"chunked_attention"})
    reads = frozenset(
        {
            *("attention_chunk_size", "attn_scale", "attn_temperature_tuning", "floor_scale"),
            *("no_rope_layers", "no_rope_layer_interval", "use_qk_norm"),
        }
    )

    @classmethod
    def check(cls, read: ConfigReader) -> None:
        """Each token has one expert, whose input its score multiplies."""
        super().check(read)
        chosen = read.size("num_experts_per_tok", default=1)
        if chosen > 1:
            raise UnsupportedModel(
                f"config.json of this {read.architecture} has num_experts_per_tok={chosen}, which "
                "is not supported; possible: 1"
            )
        whole_heads(read)
        kind = cls.rotary(read).kind
        if kind not in ("default", "linear", "llama3"):  # others change the length of what turns
            raise UnsupportedModel(
                f"config.json of this {read.architecture} has rope scaling {kind!r}, which is not "
                "supported; possible: default, linear, llama3"
            )

    @classmethod
    def layer(
        cls, read: ConfigReader, number: int, spec: AttentionSpec, rotary: RotarySpec
    ) -> tuple[AttentionSpec, RotarySpec]:
        """With the block's chunk; some blocks do not turn."""
        turns = has_positions(read, number)
        kinds = read.config.get("layer_types")
        is_cut = kinds[number] == "chunked_attention" if kinds else turns
        if is_cut:
            spec = replace(spec, chunk=read.count("attention_chunk_size", default=0))
        return spec, rotary if turns else RotarySpec(rotary.dim, 1.0, kind="none")

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts; the weight of the only one is 1, since its input has been scaled."""
        routing = RoutingSpec(read.size("num_local_experts", default=16), 1, renormalize=True)
        return read.experts(routing, dtype, width_key="intermediate_size")

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        build.weights.rename(".feed_forward.", ".mlp.")
        build.weights.rename(".mlp.router.", ".mlp.gate.")
        read = ConfigReader(config, build.tp_size)
        spec, rotary = self.attention(read, build.dtype), self.rotary(read)
        DecoderLM.__init__(
            self,
            read,
            build,
            attention=lambda build, prefix, number: ChunkedAttention(
                build, prefix, read, *self.layer(read, number, spec, rotary)
            ),
            feed_forward=self.make_feed_forward(read, build.dtype),
        )

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts in every so-many-th block, dense ones of a width of their own in the others."""
        moe, width = self.moe(read, dtype), read.size("intermediate_size")
        dense, hidden = read.size("intermediate_size_mlp", default=16384), moe.hidden_size
        step, chosen = (
            read.size("interleave_moe_layer_step", default=1),
            read.config.get("moe_layers"),
        )

        def make(build: ModelBuilder, prefix: str, number: int) -> FeedForward:
            has_experts = (number + 1) % step == 0 if chosen is None else number in chosen
            if not has_experts:
                return build.mlp(prefix, hidden, dense)
            return cast("FeedForward", ScaledExperts(build, prefix, moe, width))

        return make

    def load_weights(self, tensors: Iterable[tuple[str, StoredTensor]]) -> list[str]:
        """Experts' matrices are stored [experts, in, out]."""
        return super().load_weights(
            (
                name,
                _Transposed(stored) if ".experts." in name and len(stored.shape) == 3 else stored,
            )
            for name, stored in tensors
        )
