"""The internal formats of this distribution; layouts in words are in code.py and ccq.py."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from fastdeploy_core.contracts.quant_formats import QuantFormat

from . import ccq, code


def _tet(bits: int) -> QuantFormat:
    return QuantFormat(
        f"tet{bits}",
        f"trellis code of {bits} bits per weight; inputs rotated by signs and a Hadamard transform",
        MappingProxyType(
            {
                "weight": f"[ceil(N/64),K/8,{16 * bits}] int32: a ring of 512 weights, 64 outputs "
                "by 8 "
                "inputs",
                "scale": "[N] float16",
                "signs": "[K] int8: +1 or -1, before the transform",
                "block": "[1] int32: inputs of one transform",
            }
        ),
        code.dequantize,
        code.rotate_inputs,
    )


CCQ: Final = QuantFormat(
    "ccq2",
    "ERNIE 4.5's published 2-bit layout: a byte is an affine code of four inputs",
    MappingProxyType(
        {
            "weight": "[K/4,N] uint8",
            "scale": "[ceil(K/128),N] uint8: local scales of 64 inputs, the even group in the high "
            "nibble",
            "super_scale": "[N] float",
            "code_scale": "[N] float32",
            "code_zero": "[N] float32",
        }
    ),
    ccq.dequantize,
)
TET: Final = {bits: _tet(bits) for bits in (2, 3, 4)}
FORMATS: Final = {f.name: f for f in (CCQ, *TET.values())}
