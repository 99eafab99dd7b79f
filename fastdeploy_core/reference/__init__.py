"""The reference: every operation of the contract in plain tensor code, and the device `cpu`.

Slow only where plainness costs; exact everywhere. It is the living definition that kernels are
tested against, and it registers through the same entry points as a third party.
"""
