"""Weights in the kernels' layout, made once when a layer is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from fastdeploy_core.errors import CapabilityError

from .team import address, team

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}


class Packed:
    """A matrix [N, K] that only the kernels read. `dtype` is that of the weight it was, or of the
    activations it is multiplied with."""

    def __init__(self, native: Any, dtype: Any) -> None:
        self.native, self.dtype = native, dtype
        self.shape = (int(native.outputs), int(native.inputs))

    @property
    def rows(self) -> int:
        """Outputs of the product: half the rows of a gated matrix."""
        return self.shape[0] // 2 if self.native.gated else self.shape[0]


def pack(weight: Tensor, *, gated: bool = False) -> Packed:
    """A float matrix [N, K] in its own dtype."""
    from . import _native

    num_rows, width = map(int, weight.shape)
    kind = KINDS[team().xp.dtype_name(weight.dtype)]
    native = _native.make_packed(kind, num_rows, width, 0, gated)
    weight = weight.contiguous()
    team().native.set_rows(native, num_rows, address(weight), team().code(weight), width)
    return Packed(native, weight.dtype)


def pack_integers(
    values: np.ndarray,
    scales: np.ndarray,
    dtype: Any,
    *,
    width: int,
    bits: int,
    group: int,
    gated: bool = False,
) -> Packed:
    """Integers [N, K] int8, or of 4 bits pairs [N, ceil(K/2)] uint8 with 8 added, low nibble first; their
    scales [N, groups]; group 0: one for a row."""
    from . import _native

    num_rows = len(values)
    try:
        native = _native.make_packed(KINDS[f"int{bits}"], num_rows, width, group, gated)
    except ValueError as error:
        raise CapabilityError(
            f"device x86 cannot hold a weight [{num_rows}, {width}] of {bits} bits: {error}; quantize "
            "the model with another --group-size, or serve it with --device cpu"
        ) from None
    values = np.ascontiguousarray(values)
    scales = np.ascontiguousarray(scales, dtype=np.float32)
    team().native.set_quantized_rows(
        *(native, num_rows, values.ctypes.data, scales.ctypes.data, values.dtype == np.uint8)
    )
    return Packed(native, dtype)
