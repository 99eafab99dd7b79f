"""Weights in the kernels' layout, made once when a layer is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .team import address, team

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}


class Packed:
    """A matrix [N, K] that only the kernels read. `shape` and `dtype` are those of the weight it was."""

    def __init__(self, native: Any, dtype: Any) -> None:
        self.native, self.dtype = native, dtype
        self.shape = (native.outputs, native.inputs)

    @property
    def rows(self) -> int:
        """Outputs of the product: half the rows of a gated matrix."""
        return int(self.shape[0] // 2 if self.native.gated else self.shape[0])


def pack(weight: Tensor, *, gated: bool = False, kind: str = "", group: int = 0) -> Packed:
    """Pack a float matrix [N, K]; kind "" keeps its dtype, "int8" and "int4" round it."""
    from . import _native

    xp = team().xp
    dtype = xp.dtype_name(weight.dtype)
    native = _native.make_packed(KINDS[kind or dtype], *map(int, weight.shape), group, gated)
    weight = weight.contiguous()
    native.set_rows(0, int(weight.shape[0]), address(weight), team().code(weight), int(weight.shape[1]))
    return Packed(native, weight.dtype)


def pack_quantized(
    values: np.ndarray, scales: np.ndarray, dtype: Any, *, bits: int, group: int = 0, gated: bool = False
) -> Packed:
    """Pack integers [N, K] int8 (for 4 bits -8..7) and scales [N, groups] float32."""
    from . import _native

    native = _native.make_packed(
        KINDS[f"int{bits}"], values.shape[0], values.shape[1], group, gated
    )
    values, scales = np.ascontiguousarray(values), np.ascontiguousarray(scales, dtype=np.float32)
    native.set_quantized_rows(0, values.shape[0], values.ctypes.data, scales.ctypes.data)
    return Packed(native, dtype)
