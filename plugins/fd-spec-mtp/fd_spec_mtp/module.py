"""One multi-token-prediction module: h'[t] = Block(W [norm(embedding(token[t + m])); norm(h[t])]).

h is the target's hidden state after its final norm, or the result of the previous module. So the
m-th module predicts token[t + m + 1] (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .layout import ModuleNames

if TYPE_CHECKING:
    from fastdeploy_core.contracts.small import ExtensibleLM
    from fastdeploy_core.tensor import Tensor


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
        self._block = target.block(build, names.block, number)
        self._norm = build.norm(names.norm, hidden_size, eps) if names.norm else target.norm
        self._head = target.lm_head
        if names.head:
            self._head = build.lm_head(names.head, vocab_size, hidden_size, like=target.lm_head)

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, context: Any) -> Tensor:
        """next_ids [num_tokens] int64, hidden [num_tokens, hidden]: the new hidden states after the
        final norm, which the head and the next step read."""
        first, second = self._embedding_norm, self._hidden_norm
        embedded = self._embedding(next_ids)
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
