"""What a model family tells the core before any weight is read, and how it is handed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .layers import AttentionSpec, StateSpec
from .moe import MoESpec

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Everything about a model's shape that planning needs; built from config.json alone.

    `layers` are those that keep something of a sequence, in the order in which the family builds
    them; layers that keep nothing are left out. They and `moe` are as one rank of the tensor-parallel
    group holds them.
    """

    architecture: str
    num_layers: int
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[AttentionSpec | StateSpec, ...]
    moe: MoESpec | None = None


@runtime_checkable
class StoredTensor(Protocol):
    """A checkpoint tensor that has not been read yet; reading a part reads only that part."""

    shape: tuple[int, ...]
    dtype: str

    def read(self, *region: slice | int) -> Tensor:
        """The region (all of it without arguments), on the device, in the stored dtype."""
        ...
