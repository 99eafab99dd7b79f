"""Internal number formats of quantized checkpoints in the native layout, and the products with
them.

Weights keep their integers. Activations are rounded to int8 for each token and each group of inputs
that shares a scale. Formats that leave activations alone are served the same way, because products
of integers are several times as fast; README.md says what that costs in accuracy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from fastdeploy_core.contracts.quant_formats import PackedWeight

from .packing import Packed, pack, pack_integers, pack_trellis

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

# Format -> bits of the native layout. Four bits with a zero point need eight without one.
FORMATS: Final = {"wint8": 8, "wint4": 4, "wint4_zp": 8, "w8a8": 8, "w4a8": 4, "tet2": 2}


def pack_format(weight: PackedWeight, dtype: Any = None, *, gated: bool = False) -> Packed:
    """One matrix; its integers are not rounded again."""
    from fastdeploy_core.tensor import namespace

    xp = namespace(weight.tensors["weight"])
    stored = xp.to_numpy(weight.tensors["weight"])
    scales = xp.to_numpy(weight.tensors["scale"].float())
    bits, zero = FORMATS[weight.format.name], weight.tensors.get("zero")
    if dtype is None and weight.dtype:
        dtype = xp.dtype(weight.dtype)
    if bits == 2:
        return pack_trellis(
            *(stored, scales, xp.to_numpy(weight.tensors["signs"]), dtype),
            outputs=weight.out_features,
            rotation=int(weight.tensors["block"].item()),
            gated=gated,
        )
    if zero is not None:
        stored = _without_zero(stored, xp.to_numpy(zero), weight)
    group = weight.group_size if scales.shape[-1] > 1 else 0
    return pack_integers(
        *(stored, scales, dtype),
        width=weight.in_features,
        bits=bits,
        group=group,
        gated=gated,
    )


def _without_zero(pairs: np.ndarray, zero: np.ndarray, weight: PackedWeight) -> np.ndarray:
    """Integers of 4 bits minus their zero points, int8."""
    values = np.empty((len(pairs), 2 * pairs.shape[1]), np.int8)
    values[:, ::2], values[:, 1::2] = pairs & 15, pairs >> 4
    values = values[:, : weight.in_features]
    wide = zero.astype(np.int8)
    if wide.shape[1] > 1:
        wide = np.repeat(wide, weight.group_size, -1)[:, : weight.in_features]
    return values - wide


def prepare(weight: Tensor | PackedWeight, *, gated: bool = False) -> Packed:
    """Kernel.prepare of every product: a float matrix in its own dtype, or one of FORMATS."""
    if isinstance(weight, PackedWeight):
        return pack_format(weight, gated=gated)
    return pack(weight, gated=gated)


def prepare_gated(weight: Tensor | PackedWeight) -> Packed:
    """Kernel.prepare of "gated_linear": gate and up outputs side by side."""
    return prepare(weight, gated=True)
