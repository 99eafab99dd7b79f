"""Attention over the paged cache, in Triton.

question.py answers at start-up and imports nothing; driver.py is the driver; plan.py cuts a step's
work; decode.py, prefill.py and latent.py hold the kernels, common.py what they share.
"""
