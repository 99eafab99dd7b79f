"""One multi-token-prediction module: h'[t] = Block(W [norm(embedding(token[t + m])); norm(h[t])]).

h is the target's hidden state after its final norm, or the result of the previous module. So the
m-th module predicts token[t + m + 1] (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .layout import ModuleNames

if TYPE_CHECKING:
    from fastdeploy_core.contracts.small import ExtensibleLM
    from fastdeploy_core.layers import EmbeddedRows
    from fastdeploy_core.tensor import Tensor


class Pictures:
    """The vectors that stand in the place of some tokens' embeddings. What follows a row's last one
    comes with a later step: if it has a vector, the placeholder's embedding stands for that."""

    def __init__(self, xp: Any, vectors: Tensor, is_vector: Tensor) -> None:
        """vectors: [num_tokens, hidden]; is_vector: [num_tokens, 1] int64, 1 or 0."""
        self._xp, self._vectors, self._is_vector = xp, vectors, is_vector

    @classmethod
    def of(cls, xp: Any, embedded: EmbeddedRows, like: Tensor) -> Pictures:
        """Of the tokens that a step fed. like: [num_tokens, hidden]."""
        width, where = int(like.shape[1]), embedded.tokens
        vectors = xp.index_copy_(
            xp.zeros_like(like), 0, where, embedded.vectors[:, :width].contiguous()
        )
        shape = {"dtype": xp.int64, "device": like.device}
        is_vector = xp.zeros([int(like.shape[0]), 1], **shape)
        ones = xp.ones([int(where.shape[0]), 1], **shape)
        return cls(xp, vectors, xp.index_copy_(is_vector, 0, where, ones))

    def next(self, ends: Tensor) -> Pictures:
        """Of the tokens one place further. ends: [rows] int64, the last token of each row."""
        xp = self._xp
        vectors, is_vector = (xp.cat((x[1:], x[:1])) for x in (self._vectors, self._is_vector))
        none = xp.zeros([int(ends.shape[0]), 1], dtype=xp.int64, device=ends.device)
        return Pictures(xp, vectors, xp.index_copy_(is_vector, 0, ends, none))

    def put(self, embedded: Tensor) -> Tensor:
        """[num_tokens, hidden], with vectors in their places."""
        return self._xp.where(self._is_vector > 0, self._vectors, embedded)


class MTPModule:
    """The layers of one module, divided among ranks as the target's are."""

    def __init__(
        self,
        target: ExtensibleLM,
        build: Any,
        names: ModuleNames,
        number: int,
        *,
        hidden_size: int,
        vocab_size: int,
        eps: float,
    ) -> None:
        """`number`: index of the block as the family counts; `build`: a layers.ModelBuilder."""
        self._concat_norms = build.kernels["concat_rms_norm"]
        self._embedding = target.embedding
        if names.embedding:
            self._embedding = build.embedding(
                names.embedding, vocab_size, hidden_size, like=target.embedding
            )
        self._embedding_norm = build.norm(names.embedding_norm, hidden_size, eps)
        self._hidden_norm = build.norm(names.hidden_norm, hidden_size, eps)
        # Quantized checkpoints leave it in full precision.
        self._projection = build.linear(
            names.projection, 2 * hidden_size, hidden_size, quantize=False
        )
        self._norm = build.norm(names.norm, hidden_size, eps) if names.norm else target.norm
        self._head = target.lm_head
        if names.head:
            self._head = build.lm_head(names.head, vocab_size, hidden_size, like=target.lm_head)
        # Last: a family may change how the parts before it are read.
        self._block = target.block(build, names.block, number)

    def forward(
        self,
        next_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: Any,
        pictures: Pictures | None = None,
    ) -> Tensor:
        """next_ids [num_tokens] int64, hidden [num_tokens, hidden]: the new hidden states after the
        final norm, which the head and the next step read. pictures: of the tokens in next_ids."""
        first, second = self._embedding_norm, self._hidden_norm
        embedded = self._embedding(next_ids)
        if pictures is not None:
            embedded = pictures.put(embedded)
        joined = self._concat_norms(embedded, first.weight, hidden, second.weight, first.eps)
        x, residual = self._block(self._projection(joined), None, positions, context)
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden] to [num_rows, vocab_size] float32."""
        logits: Tensor = self._head(hidden)
        return logits

    def likeliest(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden] to ids [num_rows] int64."""
        ids: Tensor = self._head.greedy(hidden)[0]
        return ids
