"""The shape every family here shares: embedding, pre-norm blocks, final norm, lm head.

A family file lists what its blocks are made of; nothing here knows a family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastdeploy_core.contracts.model import StoredTensor
from fastdeploy_core.layers.context import ForwardContext
from fastdeploy_core.layers.norm import RMSNorm

from .reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.layers.builder import ModelBuilder
    from fastdeploy_core.tensor import Tensor

AttentionLayer = Callable[["Tensor", "Tensor", ForwardContext], "Tensor"]
FeedForward = Callable[["Tensor"], "Tensor"]


@dataclass(slots=True)
class DecoderLayer:
    """One block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    input_norm: RMSNorm
    attention: AttentionLayer
    post_attention_norm: RMSNorm
    feed_forward: FeedForward

    def __call__(
        self, residual: Tensor, update: Tensor | None, positions: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """(residual, update) before the block to those behind it; their sum is the hidden state, and
        sums before norms are fused with them."""
        if update is None:
            x = self.input_norm(residual)
        else:
            x, residual = self.input_norm.add(update, residual)
        update = self.attention(x, positions, context)
        x, residual = self.post_attention_norm.add(update, residual)
        return residual, self.feed_forward(x)


class DecoderLM:
    """Embedding, blocks, final norm and lm head under the usual checkpoint names.

    `attention` and `feed_forward` make the parts of one block from its checkpoint prefix; the second
    also gets the number of the block. `tied` is the family's default where config.json does not say.
    """

    def __init__(
        self,
        read: ConfigReader,
        build: ModelBuilder,
        *,
        attention: Callable[[str], AttentionLayer],
        feed_forward: Callable[[str, int], FeedForward],
        tied: bool = False,
        head_bias: bool = False,
    ) -> None:
        hidden, vocab = read.size("hidden_size"), read.size("vocab_size")
        eps = read.number("rms_norm_eps", default=1e-6)
        self.weights = build.weights
        self.weights.ignore("rotary_emb.inv_freq")  # computed here; old checkpoints carry it
        self.embedding = build.embedding("model.embed_tokens", vocab, hidden)
        self.layers = [
            DecoderLayer(
                input_norm=build.norm(f"{prefix}.input_layernorm", hidden, eps),
                attention=attention(f"{prefix}.self_attn"),
                post_attention_norm=build.norm(f"{prefix}.post_attention_layernorm", hidden, eps),
                feed_forward=feed_forward(f"{prefix}.mlp", number),
            )
            for number in range(read.size("num_hidden_layers"))
            for prefix in (f"model.layers.{number}",)
        ]
        self.norm = build.norm("model.norm", hidden, eps)
        is_tied = read.flag("tie_word_embeddings", default=tied)
        self.lm_head = build.lm_head(
            "lm_head", vocab, hidden, tied=self.embedding if is_tied else None, bias=head_bias
        )

    @property
    def mtp_weights(self) -> dict[str, StoredTensor]:
        """Weights of multi-token-prediction layers, by checkpoint name: kept unread, for a drafter."""
        return self.weights.kept

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """input_ids, positions: [num_tokens] int64; returns hidden states [num_tokens, hidden]."""
        residual = self.embedding(input_ids)
        update: Tensor | None = None
        for layer in self.layers:
            residual, update = layer(residual, update, positions, context)
        return self.norm.add(update, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden] to [num_rows, vocab_size], float32, whole on every rank."""
        return self.lm_head(hidden)

    def load_weights(self, tensors: Iterable[tuple[str, StoredTensor]]) -> list[str]:
        """Take every tensor it knows, by checkpoint name; return names it does not know."""
        return self.weights.load(tensors)
