"""Gemma 2 (transformers: Gemma2ForCausalLM; arXiv 2408.00118)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.layers import ForwardContext, RMSNorm
from fastdeploy_core.models.reading import ConfigReader

from .fields import StrictLM

if TYPE_CHECKING:
    from fastdeploy_core.layers import Embedding, ModelBuilder
    from fastdeploy_core.models.decoder import AttentionLayer, Block, MakeFeedForward
    from fastdeploy_core.tensor import Tensor


class ScaledEmbedding:
    """Embeddings times a number, which is rounded to their dtype."""

    def __init__(self, build: ModelBuilder, embedding: Embedding, scale: float) -> None:
        self._embedding = embedding
        self._scale = float(build.xp.tensor(scale, dtype=build.xp.dtype(build.dtype)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedding, name)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids: [num_tokens] int64; [num_tokens, hidden]."""
        return self._embedding(input_ids) * self._scale


class GeluMLP:
    """down(gelu(gate(x)) * up(x)), with the tanh form of gelu."""

    def __init__(self, build: ModelBuilder, prefix: str, hidden: int, width: int) -> None:
        self._gelu = build.xp.gelu
        self._gate = build.linear(f"{prefix}.gate_proj", hidden, width, parallel="column")
        self._up = build.linear(f"{prefix}.up_proj", hidden, width, parallel="column")
        self._down = build.linear(f"{prefix}.down_proj", width, hidden, parallel="row")

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden], model dtype; so is the result."""
        return self._down(self._gelu(self._gate(x), "tanh") * self._up(x))


@dataclass(slots=True)
class FourNormLayer:
    """One block: each part is normed before it and, on its branch, after it."""

    input_norm: RMSNorm
    attention: AttentionLayer
    post_attention_norm: RMSNorm
    pre_feed_forward_norm: RMSNorm
    feed_forward: Callable[[Tensor], Tensor]
    post_feed_forward_norm: RMSNorm
    select_rows: Callable[[Tensor, Tensor], Tensor]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As DecoderLayer; the sums are made here, because norms stand between them."""
        x = x if residual is None else x + residual
        attended = self.attention(self.input_norm(x), positions, context)
        if rows is not None:
            attended, x = self.select_rows(attended, rows), self.select_rows(x, rows)
        x = x + self.post_attention_norm(attended)
        hidden = self.feed_forward(self.pre_feed_forward_norm(x))
        return x + self.post_feed_forward_norm(hidden), None


def _accept_less_one(accept: Callable[[Tensor], None], stored: Tensor) -> None:
    """Checkpoints hold w - 1; it is added in float32."""
    accept(stored.float() + 1.0)


class FourNormLM(StrictLM):
    """Norms before and after both branches of a block."""

    # Behind attention, before the feed-forward block, behind it: names of checkpoints.
    norm_names: ClassVar[tuple[str, str, str]]

    def block(self, build: ModelBuilder, prefix: str, number: int) -> Block:
        """One block with that checkpoint prefix."""
        behind, before, last = (
            build.norm(f"{prefix}.{name}", self._hidden, self._eps) for name in self.norm_names
        )
        return FourNormLayer(
            input_norm=build.norm(f"{prefix}.input_layernorm", self._hidden, self._eps),
            attention=self._attention(build, f"{prefix}.self_attn", number),
            post_attention_norm=behind,
            pre_feed_forward_norm=before,
            feed_forward=self._feed_forward(build, f"{prefix}.mlp", number),
            post_feed_forward_norm=last,
            select_rows=build.kernels["select_rows"],
        )


class Gemma2ForCausalLM(FourNormLM):
    """Windows in every other block, capped logits, norms stored as w - 1, scaled embeddings."""

    norm_names = (
        "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    )  # fmt: skip
    activations = ("gelu_pytorch_tanh",)
    tied = True
    qkv_bias = output_bias = False
    defaults = {"sliding_window": 4096}  # noqa: RUF012 - never changed
    sliding_window_pattern = 2
    only = {"attention_bias": (False,), "use_bidirectional_attention": (False,)}  # noqa: RUF012
    reads = frozenset(
        {
            *("attn_logit_softcapping", "final_logit_softcapping", "hidden_activation"),
            *("query_pre_attn_scalar", "use_sliding_window"),
        }
    )
    default_caps = (50.0, 30.0)  # of attention and of the head, where config.json names none

    @classmethod
    def attention(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """With a scale of its own and, if there is one, a cap."""
        scale = read.number("query_pre_attn_scalar", default=256) ** -0.5
        cap = cls._cap(read, "attn_logit_softcapping", cls.default_caps[0])
        return replace(super().attention(read, dtype), scale=scale, softcap=cap)

    @staticmethod
    def _cap(read: ConfigReader, key: str, default: float) -> float:
        """null means none."""
        is_null = key in read.config and read.config[key] is None
        return 0.0 if is_null else read.number(key, default=default)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        super().__init__(config, build)
        for placement in build.weights.placements.values():
            if placement.name.endswith("norm.weight"):
                placement.accept = partial(_accept_less_one, placement.accept)
        read = ConfigReader(config, build.tp_size)
        self.embedding: Any = ScaledEmbedding(build, self.embedding, self._hidden**0.5)
        self._head_cap = self._cap(read, "final_logit_softcapping", self.default_caps[1])
        self._tanh = build.xp.tanh

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Dense blocks."""
        hidden, width = read.size("hidden_size"), read.size("intermediate_size")
        make: MakeFeedForward
        make = lambda build, prefix, _: cast("Any", GeluMLP(build, prefix, hidden, width))  # noqa: E731
        return make

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Capped, if they are; the likeliest token is the same."""
        logits = super().compute_logits(hidden)
        if not self._head_cap:
            return logits
        return self._tanh(logits / self._head_cap) * self._head_cap
