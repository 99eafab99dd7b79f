"""Blocks with a recurrence in place of attention, and families in which such blocks and attention
take turns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from fastdeploy_core.contracts.attention import StateBackend, StateWeights
from fastdeploy_core.layers import ForwardContext, Placement, RMSNorm
from fastdeploy_core.models.decoder import DecoderLM
from fastdeploy_core.models.reading import ConfigReader
from fd_models.fields import StrictLM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.contracts.model import ModelShapes, StateSpec
    from fastdeploy_core.layers import ModelBuilder, RotarySpec
    from fastdeploy_core.models.decoder import AttentionLayer
    from fastdeploy_core.tensor import Tensor


class RecurrentLayer:
    """What recurrent layers share: their state, and the weights of convolution and decay.

    conv: the convolution's names in the checkpoint: one of all its parts, or one of each. A_log,
    dt_bias and D, if the kind has them, are below `prefix`.
    """

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        spec: StateSpec,
        *conv: str,
        conv_bias: bool = False,
    ) -> None:
        self._build, self._xp, self.spec = build, build.xp, spec
        self._index = build.add_kv_layer(spec)
        self._driver: StateBackend = build.attention(spec)
        self._select_rows = build.kernels["select_rows"]
        dtype, channels = build.xp.dtype(build.dtype), sum(spec.conv_parts)
        self.weights = StateWeights(build.zeros((channels, spec.conv_width), dtype))
        if conv_bias:
            self.weights.conv_bias = build.zeros((channels,), dtype)
        start = 0
        for name, parts in zip(conv, _parts(spec, len(conv)), strict=True):
            self._place_channels(name, start, parts)
            start += sum(parts)
        if spec.kind == "short_conv":
            return
        is_channel = spec.kind == "channel_delta"
        self.weights.decay = self._place_heads(
            f"{prefix}.A_log", self._accept_decay, is_wrapped=is_channel
        )
        self.weights.dt_bias = self._place_heads(
            f"{prefix}.dt_bias", _copy, each=spec.key_dim if is_channel else 1
        )
        if spec.kind == "space":
            self.weights.skip = self._place_heads(f"{prefix}.D", _copy)

    def _place_channels(self, name: str, start: int, parts: tuple[int, ...]) -> None:
        """Channels from `start` on, of those parts, in tensors of their own."""
        place, whole = self._build.weights.add, sum(parts) * self._build.tp_size
        shape: tuple[int, ...] = (whole, 1, self.spec.conv_width)
        accept = partial(self._accept_channels, self.weights.conv, start, parts)
        place(Placement(f"{name}.weight", shape, tuple(map(slice, shape)), accept))
        if self.weights.conv_bias is not None:
            accept = partial(self._accept_channels, self.weights.conv_bias, start, parts)
            place(Placement(f"{name}.bias", (whole,), (slice(0, whole),), accept))

    def _place_heads(
        self, name: str, accept: Any, *, each: int = 1, is_wrapped: bool = False
    ) -> Tensor:
        """[num_heads * each] float32, divided among ranks as heads are; [1, 1, num_heads, 1] in
        the checkpoint if it `is_wrapped`."""
        build, count = self._build, self.spec.num_heads * each
        held, whole = build.zeros((count,), build.xp.float32), count * build.tp_size
        shape: tuple[int, ...] = (1, 1, whole, 1) if is_wrapped else (whole,)
        own, one = build.piece.of(whole), slice(0, 1)
        region = (one, one, own, one) if is_wrapped else (own,)
        build.weights.add(Placement(name, shape, region, partial(accept, held)))
        return held

    def _accept_decay(self, held: Tensor, tensor: Tensor) -> None:
        held[:] = -self._xp.exp(tensor.float()).reshape([-1])

    def _accept_channels(
        self, held: Tensor, start: int, parts: tuple[int, ...], tensor: Tensor
    ) -> None:
        """This rank's share of each of these parts of the convolution's channels, of all ranks'."""
        first = 0
        for part in parts:
            own = self._build.piece.of(part * self._build.tp_size)
            rows = tensor[first + own.start : first + own.stop]
            held[start : start + part] = rows.reshape([part, *held.shape[1:]]).to(held.dtype)
            first, start = first + part * self._build.tp_size, start + part

    def recur(
        self, x: Tensor, dt: Tensor | None, beta: Tensor | None, context: ForwardContext
    ) -> Tensor:
        """As StateBackend.forward."""
        cache, metadata = context.caches[self._index], context.metadata[self.spec]
        return self._driver.forward(x, dt, beta, self.weights, cache, metadata)

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], normed; so wide is the result."""
        raise NotImplementedError

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
        normed, total = norm.add(x, residual)
        y = self(normed, positions, context)
        if rows is not None:
            y, total = self._select_rows(y, rows), self._select_rows(total, rows)
        return y, total


def _parts(spec: StateSpec, num_names: int) -> list[tuple[int, ...]]:
    """Parts of the convolution that each of its tensors has."""
    return [spec.conv_parts] if num_names == 1 else [(part,) for part in spec.conv_parts]


def _copy(held: Tensor, tensor: Tensor) -> None:
    held[:] = tensor.float()


class HybridLM(StrictLM):
    """A family in which some blocks have a recurrent layer in place of attention."""

    # Words of layer_types for blocks with a recurrent layer.
    recurrent: ClassVar[frozenset[str]] = frozenset({"linear_attention"})
    other_layers = recurrent
    recurrent_name: ClassVar[str]  # their layer's name in the checkpoint, in self_attn's place

    @classmethod
    def is_recurrent(cls, read: ConfigReader, number: int) -> bool:
        """Whether a block has a recurrent layer, by layer_types; a family knows what holds
        without."""
        kinds = read.config.get("layer_types") or ()
        return number < len(kinds) and kinds[number] in cls.recurrent

    @classmethod
    def state(cls, read: ConfigReader, dtype: str) -> StateSpec:
        """One rank's recurrent layer."""
        raise NotImplementedError

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        shapes = super().shapes(config, tp_size, dtype)
        read = ConfigReader(config, tp_size)
        state = cls.state(read, dtype)
        pairs = enumerate(shapes.layers)
        layers = tuple(state if cls.is_recurrent(read, n) else spec for n, spec in pairs)
        return replace(shapes, layers=layers)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        spec, rotary = self.attention(read, build.dtype), self.rotary(read)
        state = self.state(read, build.dtype)

        def mixer(build: ModelBuilder, prefix: str, number: int) -> AttentionLayer:
            if not self.is_recurrent(read, number):
                return self.attend(read, build, prefix, spec, rotary)
            name = prefix.removesuffix("self_attn") + self.recurrent_name
            return self.recur(read, build, name, state)

        DecoderLM.__init__(
            self,
            read,
            build,
            attention=mixer,
            feed_forward=self.make_feed_forward(read, build.dtype),
            tied=self.tied,
        )

    def attend(
        self,
        read: ConfigReader,
        build: ModelBuilder,
        prefix: str,
        spec: AttentionSpec,
        rotary: RotarySpec,
    ) -> AttentionLayer:
        """The attention of one block."""
        bias = read.flag("attention_bias", default=False)
        return build.gqa(prefix, read.heads(), spec, rotary, qkv_bias=bias, output_bias=bias)

    def recur(
        self, read: ConfigReader, build: ModelBuilder, prefix: str, spec: StateSpec
    ) -> AttentionLayer:
        """The recurrent layer of one block."""
        raise NotImplementedError
