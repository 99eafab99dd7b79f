"""Token embedding and lm head: both divide the vocabulary among ranks.

The vocabulary is padded to a multiple of the ranks; padded rows are zero and their logits are cut
off, so that any size can be divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .linear import Linear, LinearPart
from .weight_map import Placement

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder


class VocabShare:
    """Which rows of anything with one row per token this rank holds."""

    def __init__(self, build: ModelBuilder, size: int) -> None:
        self.size = size
        self.rows = -(-size // build.tp_size)
        self.start = build.tp_rank * self.rows

    def place(
        self, build: ModelBuilder, name: str, rest: tuple[int, ...], *, is_linear: bool = False
    ) -> Tensor:
        """A zeroed [rows, *rest] that the checkpoint tensor `name` will fill."""
        dtype = build.xp.dtype(build.dtype)
        weight = build.zeros((self.rows, *rest), dtype)

        def accept(tensor: Tensor) -> None:
            weight[: tensor.shape[0]] = tensor.to(dtype)

        stop = min(self.start + self.rows, self.size)
        region = (slice(min(self.start, stop), stop), *(slice(0, size) for size in rest))
        shape = (self.size, *rest)
        build.weights.add(Placement(name, shape, region, accept, is_linear=is_linear))
        return weight


class Embedding:
    """input_ids [num_tokens] int64 to [num_tokens, hidden], model dtype."""

    def __init__(self, build: ModelBuilder, name: str, vocab_size: int, hidden: int) -> None:
        self.share = VocabShare(build, vocab_size)
        self.weight = self.share.place(build, f"{name}.weight", (hidden,))
        build.leave_unquantized(name)
        self._lookup = build.kernels["embedding"]
        self._build = build

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look tokens up; ranks without a token contribute zeros to the sum."""
        share, build = self.share, self._build
        if build.tp_size == 1:
            return self._lookup(input_ids, self.weight)
        local = input_ids - share.start
        outside = (local < 0) | (local >= share.rows)
        rows = self._lookup(local.masked_fill(outside, 0), self.weight)
        return build.all_reduce(rows.masked_fill(outside.unsqueeze(-1), 0.0))


class LMHead:
    """hidden [num_rows, hidden] to logits [num_rows, vocab_size] float32, whole on every rank."""

    def __init__(
        self,
        build: ModelBuilder,
        name: str,
        vocab_size: int,
        hidden: int,
        *,
        tied: Embedding | None = None,
        bias: bool = False,
    ) -> None:
        self._build, self._share = build, VocabShare(build, vocab_size)
        self._linear: Linear | None = None
        if tied is None and build.quantizer is not None and vocab_size % build.tp_size == 0:
            part = LinearPart(name, vocab_size, build.piece)
            self._linear = Linear(
                build, name, [part], hidden, parallel="column", bias=bias, role="lm_head"
            )
            return
        if tied is None:
            self._weight = self._share.place(build, f"{name}.weight", (hidden,), is_linear=True)
        else:
            self._weight = tied.weight
            build.weights.ignore(f"{name}.weight")
            build.leave_unquantized(name)
        self._bias = self._share.place(build, f"{name}.bias", ()) if bias else None
        self._product = build.kernels["linear"]

    def __call__(self, hidden: Tensor) -> Tensor:
        """The full logits."""
        if self._linear is not None:
            logits = self._linear(hidden)
        else:
            logits = self._product(hidden, self._weight, self._bias)
        if self._build.tp_size > 1:
            logits = self._build.all_gather(logits)
            if logits.shape[-1] != self._share.size:
                logits = logits[:, : self._share.size]
        return logits.float()
