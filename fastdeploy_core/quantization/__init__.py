"""What quantizer drivers are made of: rounding, checks, their base class. The drivers themselves
are plugins: `fd-quant-formats`, and `fd-quant-hub` for checkpoints of other tools.

Every driver produces an internal format of contracts/quant_formats.py. Kernels and the reference
products are elsewhere (reference/ops/quantized.py and device plugins). The names below are public:
quantizers of plugins are made of them (docs/how-to/write-a-quantizer.md). Importing them imports no
tensor library.
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
