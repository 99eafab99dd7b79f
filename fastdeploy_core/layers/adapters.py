"""What adds LoRA adapters to linear layers: target `lora` of fd-lora, with --enable-lora.

Each row of a step may have an adapter of its own, or none. A layer adds B(A x) to its product with
x, with the A and B of each row's adapter. The matrices of `max_loras` adapters lie in slots at fixed
addresses, so captured steps stay valid while adapters come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import SequenceExtras

    from .builder import ModelBuilder
    from .norm import RMSNorm
    from .stored import Piece


class AdaptedLinear(Protocol):
    """The adapters of one linear layer."""

    def __call__(self, y: Tensor, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """y [num_tokens, out_features of this rank] and what the rows' adapters add for x
        [num_tokens, in_features of this rank], or for norm(x); y may be overwritten. Rows without
        an adapter stay as they are."""
        ...


class Adapters(Protocol):
    """All adapters of one rank. The worker adds and resets sequences by slot, as with SlotState."""

    features: frozenset[str]  # as WorkerInfo.features

    def watch(self, kernels: KernelTable) -> KernelTable:
        """The table for layers: it notes which rows of a step they go on with."""
        ...

    def layer(
        self, build: ModelBuilder, spec: LayerSpec, pieces: Sequence[Piece], in_piece: Piece
    ) -> AdaptedLinear | None:
        """A layer is made. pieces: this rank's share of the outputs of each part; in_piece: of the
        inputs. None: no adapter may change it."""
        ...

    def attach(self, rows: Tensor) -> None:
        """rows [max_num_seqs] int64, on the device: the slots of a captured step's rows."""
        ...

    def add(self, slot: int, extras: SequenceExtras) -> None:
        """A sequence with this adapter has got a slot. InvalidRequest: it cannot be used."""
        ...

    def reset(self, slot: int) -> None:
        """The slot is free."""
        ...

    def lay_out(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """A step that is laid out on the host comes: the slots of its rows, and their tokens; [B]
        int64 each."""
        ...

    def begin(self, batch: AttentionBatch) -> None:
        """A forward pass of this batch is queued or captured next."""
        ...
