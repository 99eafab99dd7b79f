"""Number formats of weights: packing, rounding, and one quantizer driver per checkpoint format.

Every driver ends in an internal format of contracts/quant_formats.py. Kernels and the reference
products live elsewhere (reference/ops/quantized.py and device plugins).
"""
