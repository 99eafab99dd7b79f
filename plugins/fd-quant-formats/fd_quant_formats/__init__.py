"""Quantizer drivers of the formats that are made while loading: one per format that a device
multiplies, and the mix of two.

Every driver produces an internal format of fastdeploy_core.contracts.quant_formats. Importing them
imports no tensor library.
"""
