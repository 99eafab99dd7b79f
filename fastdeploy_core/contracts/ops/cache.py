"""Operations on blocks of the KV cache and on the host's copies of them."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastdeploy_core.contracts.signature import Role
from fastdeploy_core.tensor import Tensor

IN_PLACE = Role.IN_PLACE


class CacheOperations(Protocol):
    """A layer's cache is a tuple of tensors, such as keys and values, of NB blocks each."""

    def kv_write(
        self,
        rows: tuple[Annotated[Tensor, "T h d"], ...],
        cache: tuple[Annotated[Tensor, "NB BS h d", IN_PLACE], ...],
        slot_mapping: Annotated[Tensor, "T", "int64"],
        /,
    ) -> None:
        """Row i of each tensor goes to slot slot_mapping[i]: block slot // BS, place slot % BS.
        Slot -1 writes nothing."""
        ...

    def kv_copy_blocks(
        self,
        cache: tuple[Annotated[Tensor, "NB ...", IN_PLACE], ...],
        source: Annotated[Tensor, "M", "int64"],
        target: Annotated[Tensor, "M", "int64"],
        /,
    ) -> None:
        """Block target[i] becomes block source[i]; sources are read before targets are written."""
        ...

    def kv_read_blocks(
        self,
        cache: tuple[Annotated[Tensor, "NB ..."], ...],
        blocks: Annotated[Tensor, "M", "int64"],
        /,
    ) -> tuple[Annotated[Tensor, "M ..."], ...]:
        """The blocks of these numbers."""
        ...

    def kv_write_blocks(
        self,
        cache: tuple[Annotated[Tensor, "NB ...", IN_PLACE], ...],
        blocks: Annotated[Tensor, "M", "int64"],
        data: tuple[Annotated[Tensor, "M ..."], ...],
        /,
    ) -> None:
        """Block blocks[i] becomes data[i]."""
        ...
