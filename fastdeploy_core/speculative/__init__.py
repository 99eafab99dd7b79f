"""The core's speculative methods, and the verifier that all methods share.

The contract is contracts/speculative.py. The worker runs verifier and drafters after the model's
step.
"""
