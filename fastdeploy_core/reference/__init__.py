"""The reference: every operation of the contract in plain tensor code, and the device `cpu`.

It is exact, and slow only where plain code is slow. It defines what kernels are tested against, and
it registers through the same entry points as a third party.
"""
