"""The layers of an EAGLE-3 checkpoint, and what watches the target's.

    g[t] = W [h_a[t]; h_b[t]; h_c[t]],  x = [norm(embedding(token[t + 1])); norm(g[t])]
    y = g[t] + attention(x);  a[t] = y + feed_forward(norm(y));  token[t + 2] ~ head(norm(a[t]))

h are hidden states between the target's blocks. For the next draft a[t] stands in the place of
g[t + 1] (arXiv 2503.01840, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdeploy_core.errors import WeightError
from fastdeploy_core.layers import HeadShape, Placement
from fastdeploy_core.models.reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.contracts.small import ExtensibleLM
    from fastdeploy_core.layers import ForwardContext
    from fastdeploy_core.tensor import Tensor

    from .layout import Eagle3Folder


@dataclass(slots=True)
class Watched:
    """A block of the target whose output is kept for the drafter."""

    block: Any
    number: int

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As contracts.small.ExtensibleLM.block says; a copy, since the next block may overwrite
        what it is given."""
        x, residual = self.block(x, residual, positions, context, rows)
        context.kept[self.number] = x.clone() if residual is None else x + residual
        return x, residual


class Eagle3Block:
    """Divided among ranks as the target's blocks are."""

    def __init__(self, target: ExtensibleLM, build: Any, draft: Eagle3Folder) -> None:
        """build: a layers.ModelBuilder of its own."""
        self._xp, self._select = build.xp, build.kernels["select_rows"]
        self._concat_norms, read = (
            build.kernels["concat_rms_norm"],
            ConfigReader(draft.config, build.tp_size),
        )
        read.require_activation("silu", "swish")
        hidden, eps = read.size("hidden_size"), read.number("rms_norm_eps", default=1e-6)
        vocab = read.size("vocab_size")
        build.weights.rename("model.", "")
        build.weights.rename("midlayer.", "layers.0.")
        build.weights.ignore("t2d")  # the inverse of d2t
        self.projection = build.linear(
            "fc", len(draft.reads) * draft.target_hidden_size, hidden, quantize=False
        )
        size, is_tied = draft.draft_vocab_size, False
        if not draft.has("lm_head.weight"):
            is_tied = read.flag("tie_word_embeddings", default=False)
        fits = hidden == draft.target_hidden_size
        shared = target.embedding if fits and not is_tied else None
        self._embedding = build.embedding("embed_tokens", vocab, hidden, like=shared)
        self._embedding_norm = build.norm("layers.0.input_layernorm", hidden, eps)
        self._hidden_norm = build.norm("layers.0.hidden_norm", hidden, eps)
        self._from_norm = draft.norm_before_residual
        shape, bias = read.heads(), read.flag("attention_bias", default=False)
        self._attention = build.gqa(
            "layers.0.self_attn",
            HeadShape(hidden, shape.num_heads, shape.num_kv_heads, inputs=2 * hidden),
            read.gqa(build.dtype),
            read.rotary(read.head_dim()),
            qkv_bias=bias,
            output_bias=bias,
        )
        self._after_attention = build.norm("layers.0.post_attention_layernorm", hidden, eps)
        width, mlp_bias = read.size("intermediate_size"), read.flag("mlp_bias", default=False)
        read.divided("intermediate_size", width)
        self._feed_forward = build.mlp("layers.0.mlp", hidden, width, bias=mlp_bias)
        self._norm = build.norm("norm", hidden, eps)
        like = target.lm_head if fits and size == vocab else None
        if is_tied or draft.has("lm_head.weight"):
            like = None
        tied = self._embedding if is_tied else None
        self._head = build.lm_head("lm_head", size, hidden, tied=tied, like=like)
        # With a vocabulary of its own: the target's id for each of its ids; and for each of the
        # target's the column of its logits, which for others is one past the last.
        self._vocab = vocab
        self._ids: Tensor | None = None
        self._columns: Tensor | None = None
        if draft.has("d2t"):
            place = Placement("d2t", (size,), (slice(0, size),), self._take_offsets, fill=0.0)
            build.weights.add(place)

    def _take_offsets(self, offsets: Tensor) -> None:
        """d2t: how far each of the draft's ids lies below the target's."""
        xp, size = self._xp, int(offsets.shape[0])
        ones = {"dtype": xp.int64, "device": offsets.device}
        own = xp.arange(size, **ones)
        ids = self._ids = own + offsets.to(xp.int64)
        if not bool(((ids >= 0) & (ids < self._vocab)).all()):
            raise WeightError(
                f"d2t of the EAGLE-3 draft leads to ids outside of the target's {self._vocab}; the "
                "checkpoint does not belong to its config.json"
            )
        columns = xp.full((self._vocab,), size, **ones)
        self._columns = xp.index_copy_(columns, 0, ids, own)

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """ids [num_tokens] int64: the token after each one; hidden [num_tokens, hidden]: g, or a
        of the position before. Returns (what the head reads, a), of the tokens in rows [n] int64
        only; the cache gets all."""
        first, second = self._embedding_norm, self._hidden_norm
        embedded = self._embedding(ids)
        x = self._concat_norms(embedded, first.weight, hidden, second.weight, first.eps)
        residual = second(hidden) if self._from_norm else hidden
        attended = self._attention(x, positions, context)
        if rows is not None:
            attended, residual = self._select(attended, rows), self._select(residual, rows)
        x, residual = self._feed_forward.after(self._after_attention, attended, residual)
        normed, total = self._norm.add(x, residual)
        return normed, total

    def likeliest(self, normed: Tensor) -> Tensor:
        """[num_rows, hidden] to the target's ids, [num_rows] int64."""
        ids = self._head.greedy(normed)[0]
        return ids if self._ids is None else self._xp.index_select(self._ids, 0, ids)

    def logits(self, normed: Tensor) -> Tensor:
        """[num_rows, hidden] to [num_rows, the target's vocabulary] float32; tokens that cannot be
        drafted have -inf."""
        logits = self._head(normed)
        if self._columns is None:
            return logits
        xp, shape = self._xp, (int(logits.shape[0]), 1)
        none = xp.full(shape, float("-inf"), dtype=logits.dtype, device=logits.device)
        return xp.index_select(xp.cat((logits, none), 1), 1, self._columns)
