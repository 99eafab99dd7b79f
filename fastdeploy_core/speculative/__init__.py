"""Speculative methods of the core distribution and their shared verifier. Empty in this version:
the contract is contracts/speculative.py, and the worker judges given drafts by what it draws."""
