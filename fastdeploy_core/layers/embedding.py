"""Token embedding and lm head: both divide the vocabulary among ranks.

The vocabulary is padded to a multiple of the number of ranks, so any size can be divided. Padding
rows are zero and their logits are cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.quantizer import (
    HEAD_QUANTIZER,
    LayerSpec,
    PackingQuantizer,
    Quantizer,
)

from .linear import Linear, LinearPart, LinearShape
from .weight_map import Placement

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder


# Rows of a weight shared by embedding and head that are rounded at a time, if it is.
ROWS_AT_ONCE = 4096


class VocabShare:
    """The rows that this rank holds of a tensor with one row per token of the vocabulary."""

    def __init__(self, build: ModelBuilder, size: int) -> None:
        self.size = size
        self.rows = -(-size // build.tp_size)
        self.start = build.tp_rank * self.rows

    def place(self, build: ModelBuilder, name: str) -> Tensor:
        """A zeroed [rows] tensor, to be filled from the checkpoint tensor `name`."""
        dtype = build.xp.dtype(build.dtype)
        bias = build.zeros((self.rows,), dtype)

        def accept(tensor: Tensor) -> None:
            bias[: tensor.shape[0]] = tensor.to(dtype)

        self.announce(build, name, (), accept)
        return bias

    def announce(
        self,
        build: ModelBuilder,
        name: str,
        rest: tuple[int, ...],
        accept: Callable[[Tensor], None],
        *,
        is_linear: bool = False,
        required: bool = True,
    ) -> None:
        """The checkpoint tensor [size, *rest]: `accept` gets this rank's rows, without padding."""
        stop = min(self.start + self.rows, self.size)
        region = (slice(min(self.start, stop), stop), *(slice(0, size) for size in rest))
        shape = (self.size, *rest)
        build.weights.add(
            Placement(name, shape, region, accept, is_linear=is_linear, required=required)
        )


class VocabMatrix:
    """[rows, hidden] of a checkpoint tensor, in the layout of `operation`'s kernel after loading.
    Embedding and head may share one."""

    def __init__(
        self,
        build: ModelBuilder,
        share: VocabShare,
        name: str,
        hidden: int,
        operation: str,
        *,
        like: VocabMatrix | None = None,
    ) -> None:
        """like: use that one's weight, unless the checkpoint has a different tensor `name`."""
        self.operation: str = operation if like is None else like.operation
        self._build, self._share, self._like = build, share, like
        self._name, self._hidden, self._value = name.removesuffix(".weight"), hidden, None
        self._rounder: Quantizer | None = None  # of the weight, if it is rounded
        is_linear = operation == "linear"

        def announce() -> None:
            share.announce(
                build, name, (hidden,), self._accept, is_linear=is_linear, required=like is None
            )

        if like is None:
            self._value = build.place(self._name, announce)
        else:
            announce()

    @property
    def value(self) -> Any:
        """The weight that kernels get."""
        if self._value is None and self._like is not None:
            return self._like.value
        return self._value

    def share_with_head(self, name: str) -> None:
        """The head also multiplies with this weight. If the quantizer rounds heads and the device's
        products take the format, one rounded weight serves both."""
        build = self._build
        self.operation, quantizer = "linear", build.quantizer
        spec = self._head_spec(name)
        rounds = (
            quantizer is not None and quantizer.supports(spec) and not quantizer.is_stored(spec)
        )
        if rounds and build.kernels.takes("linear", HEAD_QUANTIZER):
            self._rounder = build.head_quantizer()
        if self._rounder is not None:
            build.unquantized.remove(self._name)
        else:
            build.leave_unquantized(name)

    def _head_spec(self, name: str = "") -> LayerSpec:
        rows, dtype = self._share.rows, self._build.dtype
        return LayerSpec(name or "embedding", "lm_head", self._hidden, rows, dtype=dtype)

    def _rounded(self, whole: Tensor, quantizer: Quantizer) -> Any:
        """A few rows at a time: in float32 they would take several times their memory."""
        build, spec = self._build, self._head_spec()
        tensors: dict[str, Tensor] = {}
        for first in range(0, int(whole.shape[0]), ROWS_AT_ONCE):
            part = quantizer.quantize(spec, whole[first : first + ROWS_AT_ONCE])
            for name, rows in part.items():
                if name not in tensors:
                    shape = (int(whole.shape[0]), *map(int, rows.shape[1:]))
                    tensors[name] = build.xp.empty(shape, dtype=rows.dtype, device=rows.device)
                tensors[name][first : first + ROWS_AT_ONCE] = rows
        build.hold(tensors)
        packed = (
            quantizer.packed(spec, tensors) if isinstance(quantizer, PackingQuantizer) else None
        )
        return build.keep(self._name, build.kernels.prepare(self.operation, packed))

    def _accept(self, tensor: Tensor) -> None:
        build, xp = self._build, self._build.xp
        rows = tensor.to(xp.dtype(build.dtype))
        if self._is_likes(rows):
            return
        shape = (self._share.rows, self._hidden)
        whole = rows
        if tuple(rows.shape) != shape:
            whole = xp.zeros(shape, dtype=rows.dtype, device=build.device.device)
            whole[: rows.shape[0]] = rows
        if self._rounder is not None:
            self._value = self._rounded(whole, self._rounder)
            return
        prepared = build.kernels.prepare(self.operation, whole)
        build.hold({self.operation: whole})
        # the checkpoint's own memory
        if prepared is whole and whole.data_ptr() == tensor.data_ptr():
            prepared = xp.empty(shape, dtype=rows.dtype, device=build.device.device)
            prepared[:] = rows
        self._value = build.keep(self._name, prepared) if self._like is None else prepared

    def _is_likes(self, rows: Tensor) -> bool:
        """Whether these rows equal the shared ones; those in another layout are not compared."""
        value: Any = None if self._like is None else self._like.value
        is_tensor = isinstance(value, self._build.xp.tensor_type)
        return is_tensor and bool((rows == value[: rows.shape[0]]).all())


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
        shared = None if like is None else like.matrix
        self.matrix: VocabMatrix = VocabMatrix(
            build, self.share, f"{name}.weight", hidden, "embedding", like=shared
        )
        build.leave_unquantized(name)
        self._lookup = build.kernels["embedding"]
        self._build = build

    @property
    def weight(self) -> Any:
        """The weight in the layout of the kernel."""
        return self.matrix.value

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look tokens up; a rank that does not hold a token adds zeros to the sum."""
        share, build = self.share, self._build
        if build.tp_size == 1:
            return self._lookup(input_ids, self.weight)
        local = input_ids - share.start
        outside = (local < 0) | (local >= share.rows)
        rows = self._lookup(local.masked_fill(outside, 0), self.weight)
        return build.all_reduce(rows.masked_fill(outside.unsqueeze(-1), 0.0))


class LMHead:
    """hidden [num_rows, hidden] to logits [num_rows, vocab_size] float32, all on every rank."""

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
        share = self._share = VocabShare(build, vocab_size)
        self._build, self._greedy = build, build.kernels["greedy"]
        self._product = build.kernels["linear_logits"]
        self._greedy_product = build.kernels["greedy_linear"]
        self._linear: Linear | None = None  # the quantized head
        self._matrix: VocabMatrix | None = None
        self._bias: Tensor | None = None
        if like is not None:
            self._linear, self._matrix, self._bias = like._linear, like._matrix, like._bias
            if like._matrix is not None:
                self._matrix = VocabMatrix(
                    build, share, f"{name}.weight", hidden, "linear", like=like._matrix
                )
            return
        if tied is None and build.quantizer is not None and vocab_size % build.tp_size == 0:
            part = LinearPart(name, vocab_size, build.piece)
            self._linear = Linear(
                build,
                LinearShape(name, [part], hidden, parallel="column", bias=bias, role="lm_head"),
            )
            return
        if tied is None:
            self._matrix = VocabMatrix(build, share, f"{name}.weight", hidden, "linear")
        else:
            self._matrix = tied.matrix
            tied.matrix.share_with_head(name)
            build.weights.ignore(f"{name}.weight")
        self._bias = share.place(build, f"{name}.bias") if bias else None

    @property
    def weight(self) -> Any:
        """The weight in the layout of the kernel; None if a quantizer multiplies."""
        if self._linear is not None:
            return self._linear.weight
        return None if self._matrix is None else self._matrix.value

    @property
    def bias(self) -> Tensor | None:
        """[rows of this rank]."""
        return self._bias if self._linear is None else self._linear.bias

    def __call__(self, hidden: Tensor) -> Tensor:
        """The full logits."""
        if self._linear is not None and self.weight is None:
            logits = self._linear(hidden).float()
        else:
            logits = self._product(hidden, self.weight, self.bias)
        if self._build.tp_size > 1:
            logits = self._build.all_gather(logits)
            if logits.shape[-1] != self._share.size:
                logits = logits[:, : self._share.size]
        return logits

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row ([num_rows] int64, the smallest id among equals) and its
        logit ([num_rows] float32, NaN if the row has one). The full logits are never held."""
        build, share, xp = self._build, self._share, self._build.xp
        # padding rows would win over negative logits
        is_padded = share.rows * build.tp_size != share.size
        if is_padded or self.weight is None:
            logits = self(hidden)
            ids = self._greedy(logits)
            return ids, xp.gather(logits, 1, ids.unsqueeze(1)).squeeze(1)
        ids, peaks = self._greedy_product(hidden, self.weight, self.bias)
        if build.tp_size == 1:
            return ids, peaks
        # Ranks hold consecutive ids and the first of equals is taken, so the smallest id wins.
        all_peaks = build.all_gather(peaks.unsqueeze(1))
        all_ids = build.all_gather((ids + share.start).unsqueeze(1))
        best = xp.argmax(all_peaks, -1).unsqueeze(1)
        return xp.gather(all_ids, 1, best).squeeze(1), xp.gather(all_peaks, 1, best).squeeze(1)
