"""Weights in the kernels' layout, made once when a layer is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from fastdeploy_core.errors import CapabilityError

from .team import address, team

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from . import _native

# Bfloat16 gets codes where decoding keeps pace with memory, and memory is where the weights come
# from.
CODING_ISAS, CODED_BYTES = ("avx2", "avx512_vnni", "avx512", "amx"), 1 << 20
KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "tet2": 4, "coded bfloat16": 5}


class Packed:
    """A matrix [N, K] that only the kernels read. `dtype` is that of the weight it was, or of the
    activations it is multiplied with."""

    def __init__(self, native: _native.PackedMatrix, dtype: Any) -> None:
        self.native, self.dtype = native, dtype
        self.shape = (native.outputs, native.inputs)

    @property
    def rows(self) -> int:
        """Outputs of the product: half the rows of a gated matrix."""
        return self.shape[0] // 2 if self.native.gated else self.shape[0]


def pack(weight: Tensor, *, gated: bool = False) -> Packed:
    """A float matrix [N, K] in its own dtype; bfloat16 with its exponents in codes where that
    pays."""
    from . import _native

    t, weight = team(), weight.contiguous()
    num_rows, width = map(int, weight.shape)
    name = t.xp.dtype_name(weight.dtype)
    native = None
    is_large = 2 * num_rows * width >= CODED_BYTES
    if name == "bfloat16" and is_large and t.native.isa in CODING_ISAS:
        native = t.native.code_rows(num_rows, width, address(weight), width, gated)
    if native is None:
        native = _native.make_packed(KINDS[name], num_rows, width, 0, gated)
        t.native.set_rows(native, num_rows, address(weight), t.code(weight), width)
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
    """Integers [N, K] int8, or of 4 bits pairs [N, ceil(K/2)] uint8 with 8 added, low nibble first;
    their scales [N, groups]; group 0: one for a row."""
    num_rows = len(values)
    native = _room(f"int{bits}", num_rows, width, group, gated)
    values = np.ascontiguousarray(values)
    scales = np.ascontiguousarray(scales, dtype=np.float32)
    team().native.set_quantized_rows(
        *(native, num_rows, values.ctypes.data, scales.ctypes.data, values.dtype == np.uint8)
    )
    return Packed(native, dtype)


def pack_trellis(
    strands: np.ndarray,
    scales: np.ndarray,
    signs: np.ndarray,
    dtype: Any,
    *,
    outputs: int,
    rotation: int,
    gated: bool = False,
) -> Packed:
    """The code of fd-quant-wint2's tet2: strands [ceil(N/64), K/8, 32] int32, scales [N], signs [K]
    int8; `rotation`: inputs of one Hadamard transform."""
    from . import _native

    native = _room("tet2", outputs, len(signs), 0, gated)
    strands, signs = np.ascontiguousarray(strands), np.ascontiguousarray(signs)
    scales = np.ascontiguousarray(scales, dtype=np.float32)
    addresses = (strands.ctypes.data, scales.ctypes.data, signs.ctypes.data)
    _native.set_tet(native, *addresses, rotation)
    return Packed(native, dtype)


def _room(kind: str, num_rows: int, width: int, group: int, gated: bool) -> _native.PackedMatrix:
    from . import _native

    try:
        return _native.make_packed(KINDS[kind], num_rows, width, group, gated)
    except ValueError as error:
        raise CapabilityError(
            f"device x86 cannot hold a weight [{num_rows}, {width}] in {kind}: {error}; quantize "
            "the model in another way, or serve it with --device cpu"
        ) from None
