"""Gemma 4, text, without experts (transformers: Gemma4ForCausalLM).

Blocks without a window have heads of a width of their own, and perhaps keys that serve as values.
The last blocks have no keys: they attend to those of the last block of their kind that has some,
in its cache. A second embedding gives each block an input of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.model import ModelShapes
from fastdeploy_core.errors import ConfigError, UnsupportedModel
from fastdeploy_core.layers import (
    ForwardContext,
    Linear,
    LinearPart,
    LinearShape,
    PagedAttention,
    Placement,
    RMSNorm,
    RotarySpec,
)
from fastdeploy_core.models.decoder import DecoderLM
from fastdeploy_core.models.reading import ConfigReader
from fd_models.fields import StrictLM
from fd_models.gemma2 import FourNormLayer, GeluMLP, ScaledEmbedding

from .projected import needs_own_projections, whole_heads

if TYPE_CHECKING:
    from fastdeploy_core.layers import Embedding, ModelBuilder
    from fastdeploy_core.models.decoder import AttentionLayer, Block, MakeFeedForward
    from fastdeploy_core.tensor import Tensor

_SAME = "attention_k_eq_v"
_ROPES = "ropes_by_kind"  # where rope_parameters stand once they are read
_FULL, _LOCAL = "full_attention", "sliding_attention"


class SharedKeyAttention:
    """Queries, keys and values are normed, values without a weight. `source`: attends to that
    layer's keys and values and has none."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        read: ConfigReader,
        spec: AttentionSpec,
        rotary: RotarySpec,
        source: SharedKeyAttention | None,
    ) -> None:
        shape, self._spec, dim = read.heads(), spec, spec.head_dim
        parts = [("q", shape.num_heads)] + [("k", shape.num_kv_heads)] * (source is None)
        has_v = source is None and not (read.flag(_SAME, default=False) and not spec.window)
        parts += [("v", shape.num_kv_heads)] * has_v
        bias = read.flag("attention_bias", default=False)
        column = LinearShape(
            f"{prefix}.qkv_proj",
            [LinearPart(f"{prefix}.{name}_proj", n * dim, build.piece) for name, n in parts],
            shape.hidden,
            parallel="column",
            bias=bias,
        )
        self._product = Linear(build, column)
        name, width = f"{prefix}.o_proj", shape.num_heads * dim
        self._output = build.linear(name, width, shape.hidden, bias=bias, parallel="row")
        eps = read.number("rms_norm_eps", default=1e-6)
        self._q_norm = build.norm(f"{prefix}.q_norm", dim, eps)
        self._norm, self._eps = build.kernels["rms_norm"], eps
        self._ones = build.zeros((dim,), build.xp.dtype(build.dtype)) + 1
        self._source = source
        if source is None:
            self._k_norm = build.norm(f"{prefix}.k_norm", dim, eps)
        self._paged: PagedAttention
        self._paged = (
            PagedAttention(build, prefix, spec, rotary) if source is None else source._paged
        )
        needs_own_projections(self._paged, prefix)
        self.made: Any = None  # of the step: keys, not turned, and values

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], normed, model dtype; positions: [num_tokens] int64."""
        spec = self._spec
        heads = self._product(x).reshape([x.shape[0], -1, spec.head_dim])
        q = self._q_norm(heads[:, : spec.num_heads].contiguous())
        if self._source is None:
            k, v = self._keys(heads[:, spec.num_heads :])
            self.made = k, v
        else:
            k, v = self._source.made
        if not self._paged.rotates:
            q, k = self._paged.rotate(q, k, positions, context.rotary)
        # Where keys are another layer's, they are written to its cache once more as they are.
        return self._output(self._paged.attend(q, k, v, (k, v), context))

    def _keys(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        count = self._spec.num_kv_heads
        k, v = heads[:, :count].contiguous(), heads[:, -count:].contiguous()
        return self._k_norm(k), self._norm(v, self._ones, self._eps)


@dataclass(slots=True)
class Gemma4Layer:
    """A block with four norms, then gelu(gate(x)) * input, projected, normed and added; a number
    multiplies what comes out."""

    block: FourNormLayer
    scalar: Tensor
    gelu: Callable[..., Tensor]
    number: int
    inputs: LayerInputs | None = None
    gate: Linear | None = None
    projection: Linear | None = None
    norm: RMSNorm | None = None

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As DecoderLayer."""
        x, _ = self.block(x, residual, positions, context, rows)
        if self.inputs is not None and self.gate and self.projection and self.norm:
            given = self.inputs.made[:, self.number]
            given = given if rows is None else self.block.select_rows(given.contiguous(), rows)
            x = x + self.norm(self.projection(self.gelu(self.gate(x), "tanh") * given))
        return x * self.scalar, None


class LayerInputs:
    """Each block's own input: of a second embedding and of the first one, projected."""

    def __init__(self, build: ModelBuilder, read: ConfigReader, hidden: int, eps: float) -> None:
        self.width = width = read.size("hidden_size_per_layer_input")
        count = read.size("num_hidden_layers")
        self._shape, self._scale = [-1, count, width], hidden**-0.5
        vocab = read.size("vocab_size_per_layer_input", default=read.size("vocab_size"))
        name = "model.embed_tokens_per_layer"
        second = build.embedding(name, vocab, count * width)
        self._second = ScaledEmbedding(build, second, width**0.5)
        name = "model.per_layer_model_projection"
        self._projection = build.linear(name, hidden, count * width)
        self._norm = build.norm("model.per_layer_projection_norm", width, eps)
        self.made: Any = None  # of the step: [num_tokens, blocks, width]

    def make(self, input_ids: Tensor, x: Tensor) -> None:
        """input_ids: [num_tokens] int64; x: [num_tokens, hidden], their scaled embeddings."""
        projected = self._norm((self._projection(x) * self._scale).reshape(self._shape))
        self.made = (projected + self._second(input_ids).reshape(self._shape)) * 2.0**-0.5


class Gemma4Embedding(ScaledEmbedding):
    """Makes the blocks' inputs, too."""

    inputs: LayerInputs | None = None

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids: [num_tokens] int64; [num_tokens, hidden]."""
        x = super().__call__(input_ids)
        if self.inputs is not None:
            self.inputs.make(input_ids, x)
        return x


class Gemma4ForCausalLM(StrictLM):
    """Windows in five of six blocks, or those that layer_types names; never in the last one."""

    activations = ("gelu_pytorch_tanh",)
    tied = True
    defaults = {  # noqa: RUF012 - never changed
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
    }
    only = {  # noqa: RUF012 - never changed
        "enable_moe_block": (False,),
        "use_bidirectional_attention": ("vision",),  # between tokens of a picture
    }
    reads = frozenset(
        {
            *(_ROPES, _SAME, "final_logit_softcapping", "global_head_dim", "hidden_activation"),
            *("num_global_key_value_heads", "num_kv_shared_layers", "per_layer_config"),
        }
    )

    @classmethod
    def of_block(cls, read: ConfigReader, number: int) -> tuple[ConfigReader, bool]:
        """config.json with the widths of one block, and whether it has no window."""
        last = number == read.size("num_hidden_layers") - 1
        is_full = last or not read.window(number, default=lambda number: (number + 1) % 6 != 0)
        named = read.config.get("per_layer_config")  # transformers' word for the two below
        own = dict((named or {}).get(str(number)) or {})
        if is_full and named is None:
            own = {"head_dim": read.size("global_head_dim", default=512)}
            count = read.config.get("num_global_key_value_heads")
            if count is not None and read.flag(_SAME, default=False):
                own["num_key_value_heads"] = count
        config = {**read.config, **own}
        return ConfigReader(config, read.tp_size), is_full

    @classmethod
    def specs(cls, read: ConfigReader, number: int, dtype: str) -> tuple[AttentionSpec, RotarySpec]:
        """One rank's attention of a block, and how it turns."""
        own, is_full = cls.of_block(read, number)
        whole_heads(own)
        window = 0 if is_full else read.size("sliding_window")
        spec = replace(own.gqa(dtype), scale=1.0, window=window)
        return spec, _rotary(read, _FULL if is_full else _LOCAL, spec.head_dim)

    @classmethod
    def num_own(cls, read: ConfigReader) -> int:
        """So many blocks have keys; ConfigError if a kind has no block with some."""
        total = read.size("num_hidden_layers")
        shared = read.count("num_kv_shared_layers", default=0)
        kinds = [cls.of_block(read, number)[1] for number in range(total)]
        if shared >= total or set(kinds[: total - shared]) != set(kinds):
            raise ConfigError(
                f"config.json of this {read.architecture} has num_kv_shared_layers={shared}, which "
                "leaves a kind of block without keys"
            )
        return total - shared

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank; blocks without keys keep nothing."""
        shapes = super().shapes(_usual(config), tp_size, dtype)
        read = ConfigReader({**cls.defaults, **_usual(config)}, tp_size)
        layers = [cls.specs(read, number, dtype)[0] for number in range(cls.num_own(read))]
        return replace(shapes, layers=tuple(layers))

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader({**self.defaults, **_usual(config)}, build.tp_size)
        self._num_own, self._sources = self.num_own(read), dict[bool, SharedKeyAttention]()
        self._inputs: LayerInputs | None = None
        if read.count("hidden_size_per_layer_input"):
            hidden = read.size("hidden_size")
            eps = read.number("rms_norm_eps", default=self.norm_eps)
            self._inputs = LayerInputs(build, read, hidden, eps)

        def attention(build: ModelBuilder, prefix: str, number: int) -> AttentionLayer:
            own, is_full = self.of_block(read, number)
            specs = self.specs(read, number, build.dtype)
            source = self._sources[is_full] if number >= self._num_own else None
            made = SharedKeyAttention(build, prefix, own, *specs, source)
            if source is None:
                self._sources[is_full] = made
            else:  # releases have them, and nobody uses them
                for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
                    build.weights.ignore(f"{prefix}.{name}")
            return cast("AttentionLayer", made)

        DecoderLM.__init__(
            self,
            read,
            build,
            attention=attention,
            feed_forward=self.make_feed_forward(read, build.dtype),
            tied=self.tied,
        )
        first: Embedding = self.embedding
        self.embedding: Any = Gemma4Embedding(build, first, self._hidden**0.5)
        self.embedding.inputs = self._inputs
        self._cap, self._tanh = read.number("final_logit_softcapping", default=0.0), build.xp.tanh

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Dense blocks; those without keys may be twice as wide."""
        hidden, width = read.size("hidden_size"), read.size("intermediate_size")
        is_wide = read.flag("use_double_wide_mlp", default=False)

        def make(build: ModelBuilder, prefix: str, number: int) -> Any:
            twice = is_wide and number >= self._num_own
            return GeluMLP(build, prefix, hidden, width * (2 if twice else 1))

        return make

    def block(self, build: ModelBuilder, prefix: str, number: int) -> Block:
        """One block with that checkpoint prefix."""
        size, eps = self._hidden, self._eps
        norm = partial(build.norm, size=size, eps=eps)
        four = FourNormLayer(
            input_norm=norm(f"{prefix}.input_layernorm"),
            attention=self._attention(build, f"{prefix}.self_attn", number),
            post_attention_norm=norm(f"{prefix}.post_attention_layernorm"),
            pre_feed_forward_norm=norm(f"{prefix}.pre_feedforward_layernorm"),
            feed_forward=self._feed_forward(build, f"{prefix}.mlp", number),
            post_feed_forward_norm=norm(f"{prefix}.post_feedforward_layernorm"),
            select_rows=build.kernels["select_rows"],
        )
        scalar = build.zeros((1,), build.xp.dtype(build.dtype))

        def accept(stored: Tensor) -> None:
            scalar[:] = stored.to(scalar.dtype)

        place = Placement(f"{prefix}.layer_scalar", (1,), (slice(0, 1),), accept, fill=1.0)
        build.weights.add(place)
        layer = Gemma4Layer(four, scalar, build.xp.gelu, number)
        if self._inputs is not None:
            width = self._inputs.width
            layer.inputs = self._inputs
            layer.gate = build.linear(f"{prefix}.per_layer_input_gate", size, width)
            layer.projection = build.linear(f"{prefix}.per_layer_projection", width, size)
            layer.norm = norm(f"{prefix}.post_per_layer_input_norm")
        return layer

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """As DecoderLM; what blocks passed to others is not held until the next step."""
        hidden = super().forward(input_ids, positions, context)
        for source in (*self._sources.values(), self._inputs):
            if source is not None:
                source.made = None
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Capped, if they are; the likeliest token is the same."""
        logits = super().compute_logits(hidden)
        return self._tanh(logits / self._cap) * self._cap if self._cap else logits


def _rotary(read: ConfigReader, kind: str, dim: int) -> RotarySpec:
    """ "proportional": the first part of a head's frequencies, which divide by the whole width."""
    rule = ConfigReader((read.config.get(_ROPES) or {}).get(kind) or {})
    theta = rule.number("rope_theta", default=1e6 if kind == _FULL else 1e4)
    named = rule.config.get("rope_type", "proportional" if kind == _FULL else "default")
    if named == "default":
        return RotarySpec(dim, theta)
    if named != "proportional":
        raise UnsupportedModel(
            f"config.json of this {read.architecture} has rope scaling {named!r} for blocks of "
            f"kind {kind}, which is not supported; possible: default, proportional"
        )
    share = rule.number("partial_rotary_factor", default=1.0 if rule.config else 0.25)
    turning = int(share * dim // 2)
    factors = [rule.number("factor", default=1.0)] * turning
    factors += [float("inf")] * (dim // 2 - turning)
    return RotarySpec(dim, theta, kind="factors", parameters={"factors": factors})


def _usual(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the rules of both kinds of blocks under a name of their own."""
    if _ROPES in config:
        return config
    return {**config, "rope_parameters": None, _ROPES: config.get("rope_parameters")}
