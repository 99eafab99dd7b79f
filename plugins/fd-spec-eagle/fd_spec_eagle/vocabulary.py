"""A draft's embedding and head: its own, or the target's where its checkpoint has none; and its own
vocabulary, which may be a part of the target's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdeploy_core.errors import WeightError
from fastdeploy_core.layers import Placement

if TYPE_CHECKING:
    from fastdeploy_core.contracts.small import ExtensibleLM
    from fastdeploy_core.models.reading import ConfigReader
    from fastdeploy_core.tensor import Tensor

    from .layout import DraftFolder


class Vocabulary:
    """Divided among ranks as the target's is."""

    def __init__(
        self, target: ExtensibleLM, build: Any, draft: DraftFolder, read: ConfigReader
    ) -> None:
        """build: a layers.ModelBuilder of the draft; read: of its config.json."""
        self._xp = build.xp
        hidden, vocab = read.size("hidden_size"), read.size("vocab_size")
        size, has_head = draft.draft_vocab_size, draft.has("lm_head.weight")
        is_tied = not has_head and read.flag("tie_word_embeddings", default=False)
        # What is tied to the target's embedding, too, is the target's head.
        is_tied = is_tied and draft.has("embed_tokens.weight")
        fits = hidden == draft.target_hidden_size
        shared = target.embedding if fits and not is_tied else None
        self.embedding = build.embedding("embed_tokens", vocab, hidden, like=shared)
        like = target.lm_head if fits and size == vocab and not (is_tied or has_head) else None
        tied = self.embedding if is_tied else None
        self._head = build.lm_head("lm_head", size, hidden, tied=tied, like=like)
        # With a vocabulary of its own: the target's id for each of its ids; and for each of the
        # target's the column of its logits, which for others is one past the last.
        self._vocab = vocab
        self._ids: Tensor | None = None
        self._columns: Tensor | None = None
        build.weights.ignore("t2d")  # the inverse of d2t
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
                f"d2t of the draft leads to ids outside of the target's {self._vocab}; the "
                "checkpoint does not belong to its config.json"
            )
        columns = xp.full((self._vocab,), size, **ones)
        self._columns = xp.index_copy_(columns, 0, ids, own)

    def likeliest(self, normed: Tensor) -> Tensor:
        """[num_rows, hidden] to the target's ids, [num_rows] int64."""
        ids: Tensor = self._head.greedy(normed)[0]
        return ids if self._ids is None else self._xp.index_select(self._ids, 0, ids)

    def logits(self, normed: Tensor) -> Tensor:
        """[num_rows, hidden] to [num_rows, the target's vocabulary] float32; tokens that cannot be
        drafted have -inf."""
        logits: Tensor = self._head(normed)
        if self._columns is None:
            return logits
        xp, shape = self._xp, (int(logits.shape[0]), 1)
        none = xp.full(shape, float("-inf"), dtype=logits.dtype, device=logits.device)
        return xp.index_select(xp.cat((logits, none), 1), 1, self._columns)
