"""The verifier that all speculative methods share.

Methods are plugins; the contract is contracts/speculative.py. The worker runs verifier and drafters
after the model's step.
"""
