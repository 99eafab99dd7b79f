"""Number formats of weights: packing, rounding, and one quantizer driver per checkpoint format.

Every driver produces an internal format of contracts/quant_formats.py. Kernels and the reference
products are elsewhere (reference/ops/quantized.py and device plugins).
"""
