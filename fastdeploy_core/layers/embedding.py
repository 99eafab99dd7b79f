"""Token embedding and lm head: both divide the vocabulary among ranks.

The vocabulary is padded to a multiple of the ranks; padded rows are zero and their logits are cut
off, so that any size can be divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .weight_map import Placement

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder


class VocabWeight:
    """This rank's rows of a [vocab_size, hidden] matrix."""

    def __init__(
        self, build: ModelBuilder, name: str, vocab_size: int, hidden: int, *, is_linear: bool
    ) -> None:
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // build.tp_size)
        self.start = build.tp_rank * self.rows
        self._dtype = build.xp.dtype(build.dtype)
        self.weight = build.zeros((self.rows, hidden), self._dtype)
        stop = min(self.start + self.rows, vocab_size)
        build.weights.add(
            Placement(
                name=f"{name}.weight",
                shape=(vocab_size, hidden),
                region=(slice(min(self.start, stop), stop), slice(0, hidden)),
                accept=self._accept,
                is_linear=is_linear,
            )
        )

    def _accept(self, tensor: Tensor) -> None:
        self.weight[: tensor.shape[0]] = tensor.to(self._dtype)


class Embedding:
    """input_ids [num_tokens] int64 to [num_tokens, hidden], model dtype."""

    def __init__(self, build: ModelBuilder, name: str, vocab_size: int, hidden: int) -> None:
        self.vocab = VocabWeight(build, name, vocab_size, hidden, is_linear=False)
        self._lookup = build.kernels["embedding"]
        self._build = build

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look tokens up; ranks without a token contribute zeros to the sum."""
        vocab, build = self.vocab, self._build
        if build.tp_size == 1:
            return self._lookup(input_ids, vocab.weight)
        local = input_ids - vocab.start
        outside = (local < 0) | (local >= vocab.rows)
        rows = self._lookup(local.masked_fill(outside, 0), vocab.weight)
        return build.all_reduce(rows.masked_fill(outside.unsqueeze(-1), 0.0))


class LMHead:
    """hidden [num_rows, hidden] to logits [num_rows, vocab_size] float32, whole on every rank."""

    def __init__(self, build: ModelBuilder, vocab: VocabWeight) -> None:
        self._vocab, self._build = vocab, build
        self._product = build.kernels["linear"]

    def __call__(self, hidden: Tensor) -> Tensor:
        """The full logits."""
        logits = self._product(hidden, self._vocab.weight, None)
        if self._build.tp_size > 1:
            logits = self._build.all_gather(logits)
            if logits.shape[-1] != self._vocab.vocab_size:
                logits = logits[:, : self._vocab.vocab_size]
        return logits.float()
