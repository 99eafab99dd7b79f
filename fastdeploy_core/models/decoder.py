"""The structure that all families here share: embedding, pre-norm blocks, final norm, lm head; and
the attention that most of them share.

A family's file says what is its own; nothing here depends on a family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fastdeploy_core.contracts.model import ModelShapes, StoredTensor
from fastdeploy_core.contracts.moe import MoESpec
from fastdeploy_core.layers.context import ForwardContext
from fastdeploy_core.layers.norm import RMSNorm

from .reading import ConfigReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.layers.builder import ModelBuilder
    from fastdeploy_core.layers.mlp import GatedMLP
    from fastdeploy_core.layers.moe import MoEBlock
    from fastdeploy_core.layers.rotary import RotarySpec
    from fastdeploy_core.tensor import Tensor

    Addends = tuple[Tensor, Tensor | None]
    FeedForward = GatedMLP | MoEBlock
    Block = Callable[..., Addends]  # called as DecoderLayer is
    # Makes one block's part from its checkpoint prefix and the number of the block.
    MakeAttention = Callable[[ModelBuilder, str, int], "AttentionLayer"]
    MakeFeedForward = Callable[[ModelBuilder, str, int], FeedForward]


class AttentionLayer(Protocol):
    """Attention with its projections: `build.gqa`'s, or a family's own."""

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], so is the result; positions: [num_tokens] int64."""

    def after(
        self,
        norm: RMSNorm,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> Addends:
        """Two addends of t + attention(norm(t)), [num_tokens, hidden] each, with t = x + residual;
        the second may be None. rows: [n] int64, the tokens that the result is needed for."""


@dataclass(slots=True)
class DecoderLayer:
    """One block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    input_norm: RMSNorm
    attention: AttentionLayer
    post_attention_norm: RMSNorm
    feed_forward: FeedForward

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> Addends:
        """x, residual: [num_tokens, hidden]; the block's input is their sum, or x alone; x may be
        overwritten. Returns the addends of the output in the same form, for the next norm. With
        `rows`, only these tokens are computed after the attention, and returned."""
        x, residual = self.attention.after(self.input_norm, x, residual, positions, context, rows)
        return self.feed_forward.after(self.post_attention_norm, x, residual)


class DecoderLM:
    """Embedding, blocks, final norm and lm head under the usual checkpoint names.

    `tied` is the family's default if config.json does not say. Sums before norms are fused with
    them.
    """

    features = frozenset[str]()
    norm_eps: ClassVar[float] = 1e-6  # if config.json does not say, as transformers has it
    last_norm: ClassVar[Callable[..., Any]] = RMSNorm  # called as this is

    def __init__(
        self,
        read: ConfigReader,
        build: ModelBuilder,
        *,
        attention: MakeAttention,
        feed_forward: MakeFeedForward,
        tied: bool = False,
        head_bias: bool = False,
    ) -> None:
        hidden, vocab = read.size("hidden_size"), read.size("vocab_size")
        self._hidden, self._attention, self._feed_forward = hidden, attention, feed_forward
        self._eps = read.number("rms_norm_eps", "layer_norm_eps", default=self.norm_eps)
        self.weights = build.weights
        self.weights.ignore("rotary_emb.inv_freq")  # computed here; old checkpoints contain it
        self.embedding = build.embedding("model.embed_tokens", vocab, hidden)
        self.layers = [
            self.block(build, f"model.layers.{number}", number)
            for number in range(read.size("num_hidden_layers"))
        ]
        self.norm = self.last_norm(build, "model.norm", hidden, self._eps)
        is_tied = read.flag("tie_word_embeddings", default=tied)
        self.lm_head = build.lm_head(
            "lm_head", vocab, hidden, tied=self.embedding if is_tied else None, bias=head_bias
        )

    def block(self, build: ModelBuilder, prefix: str, number: int) -> Block:
        """One block of this family with that checkpoint prefix, made like block `number`.

        Drafters use it for blocks after the last one, with a builder of their own.
        """
        return DecoderLayer(
            input_norm=build.norm(f"{prefix}.input_layernorm", self._hidden, self._eps),
            attention=self._attention(build, f"{prefix}.self_attn", number),
            post_attention_norm=build.norm(
                f"{prefix}.post_attention_layernorm", self._hidden, self._eps
            ),
            feed_forward=self._feed_forward(build, f"{prefix}.mlp", number),
        )

    @property
    def mtp_weights(self) -> dict[str, StoredTensor]:
        """Weights of multi-token-prediction layers by checkpoint name, unread, for a drafter."""
        return self.weights.kept

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """input_ids, positions: [num_tokens] int64; returns hidden states [num_tokens, hidden], or
        only those of the tokens in context.rows."""
        x, residual = self.embedding(input_ids), None
        *before, last = self.layers
        for layer in before:
            x, residual = layer(x, residual, positions, context)
        x, residual = last(x, residual, positions, context, context.rows)
        return self.norm.add(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden] to [num_rows, vocab_size] float32, all of them on every rank."""
        return self.lm_head(hidden)

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row, [num_rows] int64, and its logit: for greedy rows,
        without computing all logits."""
        return self.lm_head.greedy(hidden)

    def load_weights(self, tensors: Iterable[tuple[str, StoredTensor]]) -> list[str]:
        """Take every known tensor by checkpoint name; returns the unknown names."""
        return self.weights.load(tensors)


class GroupedQueryLM(DecoderLM):
    """A family with grouped-query attention, whose blocks may differ in what they see.

    Biases and norms are constants, or keys of config.json that say whether there are any.
    """

    rope_theta: ClassVar[float] = 10000.0
    interleaved: ClassVar[bool] = False
    partial_rotary: ClassVar[float | None] = None  # share of a head; config.json may say another
    head_norms: ClassVar[str | bool] = False
    whole_norms: ClassVar[bool] = False  # queries and keys are normalised over all heads at once
    qkv_bias: ClassVar[str | bool] = "attention_bias"
    output_bias: ClassVar[str | bool] = "attention_bias"
    mlp_bias: ClassVar[str | bool] = False
    head_bias: ClassVar[str | bool] = False
    tied: ClassVar[bool] = False
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")  # words of config.json for its own

    @classmethod
    def check(cls, read: ConfigReader) -> None:
        """Raise UnsupportedModel for what only this family's config.json may ask for."""

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec | None:
        """Experts, if the family has any."""
        return None

    @classmethod
    def rotary(cls, read: ConfigReader) -> RotarySpec:
        """What of each head turns, and how."""
        share = cls.partial_rotary
        dim = read.head_dim() if share is None else read.rotary_dim(default=share)
        return read.rotary(dim, theta=cls.rope_theta, interleaved=cls.interleaved)

    @classmethod
    def attention(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """One rank's attention, of every layer but for what `layer` says."""
        norms = _has(read, cls.head_norms)
        return read.gqa(dtype, interleaved=cls.interleaved, head_norms=norms)

    @classmethod
    def layer(
        cls, read: ConfigReader, number: int, spec: AttentionSpec, rotary: RotarySpec
    ) -> tuple[AttentionSpec, RotarySpec]:
        """Attention of one block, if it is not the same in all: what it sees, and how it turns."""
        return spec, rotary

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        read = ConfigReader(config, tp_size)
        read.require_activation(*cls.activations)
        cls.check(read)
        rotary = cls.rotary(read)
        read.divided("intermediate_size", read.size("intermediate_size"))
        spec = cls.attention(read, dtype)
        numbers = range(read.size("num_hidden_layers"))
        layers = tuple(cls.layer(read, number, spec, rotary)[0] for number in numbers)
        return replace(read.shapes(spec, cls.moe(read, dtype)), layers=layers)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        heads = replace(read.heads(), norm_whole=self.whole_norms)
        spec, rotary = self.attention(read, build.dtype), self.rotary(read)
        qkv, output = _has(read, self.qkv_bias), _has(read, self.output_bias)
        has_norms = self.whole_norms or spec.head_norms
        eps = read.number("rms_norm_eps", default=self.norm_eps) if has_norms else None
        super().__init__(
            read,
            build,
            attention=lambda build, prefix, number: build.gqa(
                prefix,
                heads,
                *self.layer(read, number, spec, rotary),
                qkv_bias=qkv,
                output_bias=output,
                norm_eps=eps,
            ),
            feed_forward=self.make_feed_forward(read, build.dtype),
            tied=self.tied,
            head_bias=_has(read, self.head_bias),
        )

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Dense blocks; a family with experts overrides it."""
        hidden, width = read.size("hidden_size"), read.size("intermediate_size")
        bias = _has(read, self.mlp_bias)
        return lambda build, prefix, _: build.mlp(prefix, hidden, width, bias=bias)


def _has(read: ConfigReader, bias: str | bool) -> bool:
    return read.flag(bias, default=False) if isinstance(bias, str) else bias
