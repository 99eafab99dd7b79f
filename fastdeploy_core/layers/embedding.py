"""Token embedding and lm head: both divide the vocabulary among ranks.

The vocabulary is padded to a multiple of the ranks; padded rows are zero and their logits are cut
off, so that any size can be divided.
"""

from __future__ import annotations

from collections.abc import Callable
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

        self._announce(build, name, rest, accept, is_linear=is_linear)
        return weight

    def borrow(
        self,
        build: ModelBuilder,
        name: str,
        weight: Tensor,
        replace: Callable[[Tensor], None],
        *,
        is_linear: bool = False,
    ) -> None:
        """Another layer's weight is used unless the checkpoint has a tensor `name` that differs from
        it; then `replace` gets a weight of its own."""

        def accept(tensor: Tensor) -> None:
            own = tensor.to(weight.dtype)
            if not bool((own == weight[: own.shape[0]]).all()):
                full = build.zeros(tuple(weight.shape), weight.dtype)
                full[: own.shape[0]] = own
                replace(full)

        rest = tuple(int(size) for size in weight.shape[1:])
        self._announce(build, name, rest, accept, is_linear=is_linear, required=False)

    def _announce(
        self,
        build: ModelBuilder,
        name: str,
        rest: tuple[int, ...],
        accept: Callable[[Tensor], None],
        *,
        is_linear: bool,
        required: bool = True,
    ) -> None:
        stop = min(self.start + self.rows, self.size)
        region = (slice(min(self.start, stop), stop), *(slice(0, size) for size in rest))
        shape = (self.size, *rest)
        build.weights.add(
            Placement(name, shape, region, accept, is_linear=is_linear, required=required)
        )


class Embedding:
    """input_ids [num_tokens] int64 to [num_tokens, hidden], model dtype."""

    def __init__(
        self,
        build: ModelBuilder,
        name: str,
        vocab_size: int,
        hidden: int,
        *,
        like: Embedding | None = None,
    ) -> None:
        self.share = VocabShare(build, vocab_size)
        if like is None:
            self.weight = self.share.place(build, f"{name}.weight", (hidden,))
        else:
            self.weight = like.weight
            self.share.borrow(build, f"{name}.weight", self.weight, self._replace)
        build.leave_unquantized(name)
        self._lookup = build.kernels["embedding"]
        self._build = build

    def _replace(self, weight: Tensor) -> None:
        self.weight = weight

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
        like: LMHead | None = None,
    ) -> None:
        self._build, self._share = build, VocabShare(build, vocab_size)
        self._product, self._greedy = build.kernels["linear"], build.kernels["greedy"]
        self._greedy_product = build.kernels["greedy_linear"]
        self._linear: Linear | None = None  # quantized
        self.weight: Tensor
        self.bias: Tensor | None
        if like is not None:
            self._linear, self.weight, self.bias = like._linear, like.weight, like.bias
            if self._linear is None:
                self._share.borrow(
                    build, f"{name}.weight", self.weight, self._replace, is_linear=True
                )
            return
        if tied is None and build.quantizer is not None and vocab_size % build.tp_size == 0:
            self.weight = self.bias = None
            part = LinearPart(name, vocab_size, build.piece)
            self._linear = Linear(
                build, name, [part], hidden, parallel="column", bias=bias, role="lm_head"
            )
            return
        if tied is None:
            self.weight = self._share.place(build, f"{name}.weight", (hidden,), is_linear=True)
        else:
            self.weight = tied.weight
            build.weights.ignore(f"{name}.weight")
            build.leave_unquantized(name)
        self.bias = self._share.place(build, f"{name}.bias", ()) if bias else None

    def _replace(self, weight: Tensor) -> None:
        self.weight, self.bias = weight, None

    def __call__(self, hidden: Tensor) -> Tensor:
        """The full logits."""
        if self._linear is not None:
            logits = self._linear(hidden)
        else:
            logits = self._product(hidden, self.weight, self.bias)
        if self._build.tp_size > 1:
            logits = self._build.all_gather(logits)
            if logits.shape[-1] != self._share.size:
                logits = logits[:, : self._share.size]
        return logits.float()

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row ([num_rows] int64, the smallest id among equals) and its logit
        ([num_rows] float32, NaN if the row has one); the logits are never held as a whole."""
        build, share, xp = self._build, self._share, self._build.xp
        is_padded = share.rows * build.tp_size != share.size  # these rows win over negative logits
        if is_padded or self._linear is not None:
            logits = self(hidden)
            ids = self._greedy(logits)
            return ids, xp.gather(logits, 1, ids.unsqueeze(1)).squeeze(1)
        ids, peaks = self._greedy_product(hidden, self.weight, self.bias)
        if build.tp_size == 1:
            return ids, peaks
        # Ranks hold consecutive ids and the first among equals is taken, so the smallest id wins.
        all_peaks = build.all_gather(peaks.unsqueeze(1))
        all_ids = build.all_gather((ids + share.start).unsqueeze(1))
        best = xp.argmax(all_peaks, -1).unsqueeze(1)
        return xp.gather(all_ids, 1, best).squeeze(1), xp.gather(all_peaks, 1, best).squeeze(1)
