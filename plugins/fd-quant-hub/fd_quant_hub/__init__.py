"""Quantizers for checkpoint formats of other tools: GPTQ, AWQ, compressed-tensors."""
