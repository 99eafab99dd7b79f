"""What adds LoRA adapters to linear layers: target `lora` of fd-lora, with --enable-lora.

A layer adds B(A x) to its product with x, with the A and B of each row's adapter. These lie in
slots at fixed addresses: captured steps stay valid while adapters come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import SequenceExtras

    from .builder import ModelBuilder
    from .stored import Piece


class Adapters(Protocol):
    """All adapters of one rank. `add` and `reset` as SequenceMedia's: InvalidRequest for an adapter
    that cannot be used."""

    features: frozenset[str]  # as WorkerInfo.features

    def watch(self, kernels: KernelTable) -> KernelTable:
        """The table for layers: it notes which rows of a step they go on with."""
        ...

    def layer(
        self, build: ModelBuilder, spec: LayerSpec, pieces: Sequence[Piece], in_piece: Piece
    ) -> Callable[..., Tensor] | None:
        """For a layer that is made: called with y [num_tokens, out_features], x [num_tokens,
        in_features] and maybe the RMSNorm of x that the product was of, it returns y, perhaps in
        place, with what the rows' adapters add. pieces: this rank's share of the outputs of each
        part; in_piece: of the inputs. None: no adapter may change the layer."""
        ...

    def attach(self, rows: Tensor) -> None:
        """rows [max_num_seqs] int64, on the device: the slots of a captured step's rows."""
        ...

    def add(self, slot: int, extras: SequenceExtras) -> None: ...

    def reset(self, slot: int) -> None: ...

    def lay_out(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """A step laid out on the host comes: the slots of its rows, and their tokens, [B] int64."""
        ...

    def begin(self, batch: AttentionBatch) -> None:
        """A forward pass of this batch is queued or captured next."""
        ...
