"""Quantizer drivers of the formats that are made while loading: one per format that a device
multiplies, and the mix of two. And what quantizers are made of: rounding, checks, their base class.

Every driver produces an internal format of fastdeploy_core.contracts.quant_formats. The names below
are public: quantizers of other plugins are made of them (docs/how-to/write-a-quantizer.md).
Importing them imports no tensor library.
"""

from .base import (
    PackedQuantizer,
    check_group,
    check_scale,
    group_size_of,
    largest_scale,
    names_in,
    spread_parts,
)
from .rounding import quantize_block_fp8, quantize_fp8, quantize_int4, quantize_int8

__all__ = [
    "PackedQuantizer",
    "check_group",
    "check_scale",
    "group_size_of",
    "largest_scale",
    "names_in",
    "quantize_block_fp8",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "spread_parts",
]
