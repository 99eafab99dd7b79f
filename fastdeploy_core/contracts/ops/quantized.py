"""Operations that only quantized models need: one of each kind for every number format.

A device that lacks one falls back when a layer asks for it, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, Protocol

from fastdeploy_core.contracts.attention import KVScales
from fastdeploy_core.contracts.kv_formats import KV_FORMATS
from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight
from fastdeploy_core.contracts.signature import Operation, Role
from fastdeploy_core.tensor import Tensor


class QuantizedOperations(Protocol):
    """A weight is what the cell's `prepare` made of a PackedWeight, or else the PackedWeight."""

    def linear(
        self,
        x: Annotated[Tensor, "T K"],
        weight: PackedWeight,
        bias: Annotated[Tensor, "N"] | None,
        /,
    ) -> Annotated[Tensor, "T N"]:
        """x as the format rounds it, times the weight's numbers transposed, plus the bias."""
        ...

    def moe_experts(
        self,
        x: Annotated[Tensor, "T H"],
        topk_ids: Annotated[Tensor, "T KE", "int64"],
        topk_weights: Annotated[Tensor, "T KE", "float32"],
        gate_up: PackedWeight,
        down: PackedWeight,
        /,
    ) -> Annotated[Tensor, "T H"]:
        """moe_experts with weights of the format."""
        ...

    def kv_write(
        self,
        rows: tuple[Annotated[Tensor, "T h d"], ...],
        cache: tuple[Annotated[Tensor, "NB BS h w", "any", Role.IN_PLACE], ...],
        slot_mapping: Annotated[Tensor, "T", "int64"],
        scales: KVScales | None,
        /,
    ) -> None:
        """kv_write into a cache of the format; without scales the cache holds its own, after the
        numbers (contracts/kv_formats.py)."""
        ...


FORMAT_OPERATIONS: Final[Mapping[str, Operation]] = MappingProxyType(
    {
        **{
            f.linear: Operation(f.linear, QuantizedOperations.linear, f.summary)
            for f in FORMATS.values()
        },
        **{
            f.experts: Operation(f.experts, QuantizedOperations.moe_experts, f.summary)
            for f in FORMATS.values()
        },
    }
)
KV_OPERATIONS: Final[Mapping[str, Operation]] = MappingProxyType(
    {f.write: Operation(f.write, QuantizedOperations.kv_write) for f in KV_FORMATS.values()}
)
