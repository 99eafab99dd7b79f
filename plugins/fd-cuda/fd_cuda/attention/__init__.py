"""Attention over the paged cache, in Triton.

question.py answers at start-up and imports nothing; gqa.py is the driver; plan.py cuts a step's
work; decode.py and prefill.py hold the kernels, common.py what they share; latent/ has drivers and
kernels of its own.
"""
