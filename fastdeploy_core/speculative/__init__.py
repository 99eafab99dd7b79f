"""Speculative methods of the core distribution, and the verifier that all methods share.

The contract is contracts/speculative.py; worker/speculation.py runs drafters and verifier behind
the model's step.
"""
